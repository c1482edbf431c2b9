"""Containers without a container engine: namespaces of their own for mounts, processes, host name and IPC, a
root that is put together from parts of this machine, an ordinary user, no capability. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_INIT = Path(__file__).with_name("container_init.py")
_ALONE = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")


def why_not() -> str:
    """Return why this machine can have no such containers; empty where it can."""
    if os.geteuid() != 0:
        return "containers of the tests need root"
    if shutil.which("unshare") is None:
        return "unshare not found: install util-linux"
    probe = subprocess.run([*_ALONE, "true"], capture_output=True, text=True, check=False)
    return f"this system allows no namespaces: {probe.stderr.strip()}" if probe.returncode else ""


def image_folders() -> list[str]:
    """Return the folders of this machine that make an image with Python and its packages."""
    found = {sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))}
    # Of an environment that sees another one's packages, that one as a whole: it has the programs too.
    found |= {str(Path(path).parents[2]) for path in found if path.endswith("site-packages")}
    return sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def system_parts() -> tuple[list[str], dict[str, str]]:
    """Return the system's folders, and the links of a merged /usr."""
    folders, links = [], {}
    for name in ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/opt"):
        path = Path(name)
        if path.is_symlink():
            links[name] = os.readlink(path)
        elif path.exists():
            folders.append(name)
    return folders, links


@dataclass
class Container:
    """One container. Binds are (folder here, folder there, read-only); `memory` are (folder, size, mode)."""

    command: Sequence[str]
    environment: Mapping[str, str]
    hostname: str = "container"
    user: int = 0
    folder_of_work: str = "/"
    read_only: bool = True
    binds: list[tuple[str, str, bool]] = field(default_factory=list)
    overlays: list[tuple[str, str, str]] = field(default_factory=list)
    memory: list[tuple[str, str, str]] = field(default_factory=list)

    def command_line(self, folder: Path) -> list[str]:
        """Write the container down in `folder`; return the command that runs it in this network namespace."""
        _, links = system_parts()
        spec = {**vars(self), "folder": str(folder / "root"), "links": links}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "container.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(spec))
        return [*_ALONE, sys.executable, "-S", str(_INIT), str(path)]

    def run(self, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end, in the network of this process."""
        with tempfile.TemporaryDirectory(prefix="paceline-container-") as folder:
            return subprocess.run(self.command_line(Path(folder)), text=True, check=False, **options)


def first_process(unshare: int) -> int | None:
    """Return the container's process 1, as this machine numbers it; None where it has ended or not begun."""
    try:
        text = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
    except OSError:
        return None
    return int(text[0]) if text else None


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a container. `--kill-child` of unshare does not: the kernel forgets it as process 1 becomes an
    ordinary user."""
    with suppress(ProcessLookupError):
        if (first := first_process(process.pid)) is not None:
            os.kill(first, signal.SIGKILL)
    process.kill()


def path_variable() -> str:
    """Return PATH of an image of this machine's parts: the environment's `python3` first."""
    return f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
