"""Carry out the instructions of a Dockerfile without a container engine.

FROM stands for a root that is put together from the Python and packages of this machine; every folder of it
is an overlay, so that RUN and COPY write to layers of their own. Knows the instructions that the Dockerfile
of this project uses: FROM, ARG, ENV, COPY, RUN, WORKDIR, USER, ENTRYPOINT, CMD; another one is an error.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.clusters.kubernetes import sandbox
from tests.clusters.kubernetes.sandbox import Container


@dataclass
class Image:
    """What the instructions made: layers below `folder`, and how a container of it starts."""

    context: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder_of_work: str = "/"
    user: int = 0
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    base: str = ""

    def container(self, command: list[str] | None = None, *, user: int | None = None) -> Container:
        """Return a container of this image; the root is writable only for the build, which is root's."""
        system, _ = sandbox.system_parts()
        overlays, building = [], user == 0
        for number, path in enumerate([*system, *sandbox.image_folders()]):
            overlays.append((path, str(self.folder / f"layer{number}" / "upper"), path))
        binds = [(str(path), f"/{path.name}", not building) for path in self._own_folders()]
        # Names are resolved as on this machine.
        binds += [(name, name, True) for name in ("/etc/resolv.conf", "/etc/hosts") if Path(name).exists()]
        return Container(
            [*self.entrypoint, *(self.command if command is None else command)],
            dict(self.environment),
            user=self.user if user is None else user,
            folder_of_work=self.folder_of_work,
            read_only=not building,
            overlays=overlays,
            binds=binds,
            memory=[("/tmp", "512m", "1777")],
        )

    def own_folder(self, name: str) -> Path:
        """Return a folder at the top of the image's root that is not this machine's."""
        place = self.folder / "own" / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _own_folders(self) -> list[Path]:
        own = self.folder / "own"
        return sorted(own.iterdir()) if own.exists() else []


def build(path: Path, folder: Path) -> Image:
    """Carry out a Dockerfile whose context is its folder."""
    image = Image(path.parent, folder, {"PATH": sandbox.path_variable()})
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        _carry_out(image, name, rest.strip())
    return image


def _carry_out(image: Image, name: str, rest: str) -> None:
    match name:
        case "FROM":
            image.base = rest
        case "ARG":
            key, _, value = rest.partition("=")
            image.arguments[key] = value
        case "ENV":
            image.environment |= dict(pair.split("=", 1) for pair in rest.split())
        case "WORKDIR":
            image.folder_of_work = rest
            image.own_folder(rest.strip("/"))
        case "USER":
            image.user = int(rest.partition(":")[0])
        case "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        case "CMD":
            image.command = json.loads(rest)
        case "COPY":
            *sources, target = rest.split()
            _copy(image, sources, target)
        case "RUN":
            _run(image, rest)
        case _:
            raise ValueError(f"{name}: an instruction that the test does not know")


def _copy(image: Image, sources: list[str], target: str) -> None:
    top, _, below = target.strip("/").partition("/")
    place = image.own_folder(top) / below
    for source in sources:
        origin = image.context / source
        if origin.is_dir():
            shutil.copytree(origin, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, place)


def _run(image: Image, script: str) -> None:
    for key, value in image.arguments.items():
        script = script.replace(f"${{{key}}}", value)
    container = image.container(user=0)
    container.command = ["sh", "-ec", script]
    done = container.run(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"RUN {script}: exit code {done.returncode}\n{done.stdout}")


def python_packages() -> Path:
    """Return the folder of this environment's packages."""
    return Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
