"""What a disk may hold after the power fails: replayed from a record of calls, pessimistically.

Ending a process loses nothing that was handed to the kernel; a power cut loses all that was not flushed, in
any order. The model: a file keeps what it held at its last fsync, a folder the names it held at its last
fsync. What was not flushed may be there or not, each name for itself, and unflushed content may be there, be
cut in half or be missing. Must not know what the files mean.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from paceline.testing.crash_points import Made

Content = Literal["flushed", "half", "all"]


@dataclass(eq=False)
class _File:
    now: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass(eq=False)
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    flushed: dict[str, _File | _Folder] = field(default_factory=dict)


_Node = _File | _Folder


@dataclass(frozen=True)
class Disk:
    """One possible disk after the cut."""

    description: str
    files: dict[str, bytes]
    folders: tuple[str, ...]

    def restore(self, target: Path) -> None:
        """Make a folder of this machine look like it."""
        target.mkdir()
        for folder in self.folders:
            (target / folder).mkdir()
        for name, data in self.files.items():
            (target / name).write_bytes(data)


def disks_after(made: Sequence[Made], root: str) -> Iterator[Disk]:
    """The disks that may be left of `root` when the power fails after these calls."""
    model = _Model(root)
    for call in made:
        model.apply(call)
    pending = model.pending()
    yield model.disk("only what was flushed", frozenset(), "flushed")
    contents: tuple[Content, ...] = ("flushed", "half", "all")
    for content in contents:
        yield model.disk(f"all names, content {content}", frozenset(pending), content)
    for one in pending:
        yield model.disk(f"of the unflushed names only {one[1]}", frozenset({one}), "flushed")
        yield model.disk(f"all names but {one[1]}", frozenset(pending) - {one}, "half")


@final
class _Model:
    """A folder tree, in memory and on the disk, that calls change."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._top = _Folder()
        self._descriptors: dict[int, _Node] = {}
        self._folders: list[tuple[str, _Folder]] = [("", self._top)]
        self._handlers: dict[str, Callable[[Made], None]] = {
            "mkdir": self._mkdir,
            "open": self._open,
            "write": self._write,
            "fsync": self._fsync,
            "close": self._close,
            "rename": self._rename,
            "unlink": self._remove,
            "rmdir": self._remove,
        }

    def apply(self, call: Made) -> None:
        handler = self._handlers.get(call.name)
        if handler is not None and not call.failed:
            handler(call)

    def pending(self) -> list[tuple[str, str]]:
        """(folder, name) of every entry that is not on the disk as it is in memory."""
        found = []
        for path, folder in self._folders:
            for name in sorted(folder.now.keys() | folder.flushed.keys()):
                if folder.now.get(name) is not folder.flushed.get(name):
                    found.append((path, name))
        return found

    def disk(self, description: str, survived: frozenset[tuple[str, str]], content: Content) -> Disk:
        files: dict[str, bytes] = {}
        folders: list[str] = []

        def walk(path: str, folder: _Folder) -> None:
            for name in sorted(folder.now.keys() | folder.flushed.keys()):
                node = (folder.now if (path, name) in survived else folder.flushed).get(name)
                where = f"{path}/{name}" if path else name
                if isinstance(node, _Folder):
                    folders.append(where)
                    walk(where, node)
                elif node is not None:
                    files[where] = _content(node, content)

        walk("", self._top)
        return Disk(description, files, tuple(folders))

    def _inside(self, path: str) -> str | None:
        if path == self._root:
            return ""
        return path[len(self._root) + 1 :] if path.startswith(self._root + os.sep) else None

    def _parent(self, path: str) -> tuple[_Folder, str] | None:
        inside = self._inside(path)
        if not inside:
            return None
        folder = self._top
        *above, name = inside.split("/")
        for step in above:
            node = folder.now[step]
            assert isinstance(node, _Folder)
            folder = node
        return folder, name

    def _mkdir(self, call: Made) -> None:
        place = self._parent(call.arguments[0])
        if place is not None:
            folder, name = place
            made = _Folder()
            folder.now[name] = made
            self._folders.append((self._inside(call.arguments[0]) or "", made))

    def _open(self, call: Made) -> None:
        path, flags = call.arguments[:2]
        place = self._parent(path)
        if place is None:
            if path == self._root:
                self._descriptors[call.result] = self._top
            return
        folder, name = place
        node = folder.now.setdefault(name, _File()) if flags & os.O_CREAT else folder.now[name]
        if isinstance(node, _File) and flags & os.O_TRUNC:
            node.now = bytearray()
        self._descriptors[call.result] = node

    def _write(self, call: Made) -> None:
        node = self._descriptors.get(call.arguments[0])
        if isinstance(node, _File):
            node.now += call.arguments[1][: call.result]

    def _fsync(self, call: Made) -> None:
        node = self._descriptors.get(call.arguments[0])
        if isinstance(node, _File):
            node.flushed = bytes(node.now)
        elif node is not None:
            node.flushed = dict(node.now)

    def _close(self, call: Made) -> None:
        self._descriptors.pop(call.arguments[0], None)

    def _rename(self, call: Made) -> None:
        source, target = (self._parent(path) for path in call.arguments)
        if source is not None and target is not None:
            target[0].now[target[1]] = source[0].now.pop(source[1])

    def _remove(self, call: Made) -> None:
        place = self._parent(call.arguments[0])
        if place is not None:
            del place[0].now[place[1]]


def _content(file: _File, content: Content) -> bytes:
    if content == "flushed":
        return file.flushed
    return bytes(file.now if content == "all" else file.now[: (len(file.flushed) + len(file.now)) // 2])
