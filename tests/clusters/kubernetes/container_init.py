"""Process 1 of a container: mounts its root, gives up every right, becomes the command.

    unshare --mount --pid --uts --ipc --fork --kill-child python3 container_init.py SPEC

SPEC is a JSON file: `folder` (where the root is assembled), `binds` [[source, target, read-only]], `overlays`
[[lower, upper, target]], `memory` [[target, size, mode]], `links`, `hostname`, `user`, `command`,
`environment`, `folder_of_work`, `read_only`. Needs nothing but Python's own library.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_NO_NEW_PRIVS, _CAPBSET_DROP = 38, 24
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    texts = [text.encode() for text in (source, str(target), kind, data)]
    if _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def assemble(spec: dict[str, Any]) -> Path:
    """Put the root together from parts of this machine."""
    mount("none", Path("/"), "", _REC | _PRIVATE)
    root = Path(spec["folder"])
    root.mkdir(parents=True, exist_ok=True)
    mount("tmpfs", root, "tmpfs", 0, "mode=755")
    for name, target in spec["links"].items():
        (root / name.lstrip("/")).symlink_to(target)
    for folder in ("proc", "dev", "tmp", "run"):
        (root / folder).mkdir()
    mount("proc", root / "proc", "proc", _NOSUID | _NODEV)
    mount("tmpfs", root / "dev", "tmpfs", _NOSUID, "mode=755,size=64k")
    for device in _DEVICES:
        (root / "dev" / device).touch()
        mount(f"/dev/{device}", root / "dev" / device, "", _BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (root / "dev" / name).symlink_to(target)
    # Sorted as container runtimes do: a volume may lie in another one.
    mounts = [(target, partial(_mount_memory, root, target, *rest)) for target, *rest in spec["memory"]]
    mounts += [(entry[-1], partial(_mount_overlay, root, *entry)) for entry in spec["overlays"]]
    mounts += [(entry[1], partial(_mount_bind, root, *entry)) for entry in spec["binds"]]
    for _, make in sorted(mounts, key=lambda entry: entry[0].count("/")):
        make()
    return root


def _mount_memory(root: Path, target: str, size: str, mode: str) -> None:
    mount("tmpfs", _place(root, target, None), "tmpfs", _NOSUID | _NODEV, f"size={size},mode={mode}")


def _mount_overlay(root: Path, lower: str, upper: str, target: str) -> None:
    place, work = _place(root, target, Path(lower)), Path(upper).with_name("work")
    for layer in (Path(upper), work):
        layer.mkdir(parents=True, exist_ok=True)
    mount("overlay", place, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")


def _mount_bind(root: Path, source: str, target: str, read_only: bool) -> None:
    place = _place(root, target, Path(source))
    mount(source, place, "", _BIND | _REC)
    if read_only:
        mount(source, place, "", _BIND | _REMOUNT | _RDONLY)


def _place(root: Path, target: str, source: Path | None) -> Path:
    place = root / target.lstrip("/")
    if source is None or stat.S_ISDIR(source.stat().st_mode):
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return place


def give_up_rights(user: int) -> None:
    """Drop every capability, for good, and become the user."""
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([user])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    root = assemble(spec)
    socket.sethostname(spec["hostname"])
    if spec["read_only"]:
        mount("tmpfs", root, "", _REMOUNT | _BIND | _RDONLY)
    os.chroot(root)
    os.chdir(spec["folder_of_work"])
    os.umask(0o022)
    if spec["user"]:
        give_up_rights(spec["user"])
    os.closerange(3, 1024)
    command, environment = spec["command"], spec["environment"]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"exec {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1])
