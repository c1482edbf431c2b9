"""Model of a disk after a power failure: what it may hold, replayed from a record of calls, pessimistically.

Ending a process loses nothing that was handed to the kernel; a power cut loses all that was not flushed, in
any order. The model: a file keeps what it held at its last fsync, a folder the names it held at its last
fsync. What was not flushed may be there or not, each name independently, and unflushed content may be
complete, cut in half or missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final, get_args

from paceline.testing.storage_crash_points import RecordedCall

Content = Literal["flushed", "half", "all"]


@dataclass(eq=False)
class _DiskFile:
    now: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass(eq=False)
class _DiskFolder:
    now: dict[str, _DiskFile | _DiskFolder] = field(default_factory=dict)
    flushed: dict[str, _DiskFile | _DiskFolder] = field(default_factory=dict)


_DiskEntry = _DiskFile | _DiskFolder


@dataclass(frozen=True)
class Disk:
    """One possible disk after the cut."""

    description: str
    files: dict[str, bytes]
    folders: tuple[str, ...]

    def restore(self, target: Path) -> None:
        """Write its content into a folder."""
        target.mkdir()
        for folder in self.folders:
            (target / folder).mkdir()
        for name, data in self.files.items():
            (target / name).write_bytes(data)


def disks_after(made: Sequence[RecordedCall], root: str) -> Iterator[Disk]:
    """Return the disks that may be left of `root` when the power fails after these calls."""
    model = _Model(root)
    for call in made:
        model.apply(call)
    pending = model.pending()
    yield model.disk("only what was flushed", frozenset(), "flushed")
    for content in get_args(Content):
        yield model.disk(f"all names, content {content}", frozenset(pending), content)
    for one in pending:
        yield model.disk(f"of the unflushed names only {one[1]}", frozenset({one}), "flushed")
        yield model.disk(f"all names but {one[1]}", frozenset(pending) - {one}, "half")


@final
class _Model:
    """A folder tree, in memory and on the disk, that calls change."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._top = _DiskFolder()
        self._descriptors: dict[int, _DiskEntry] = {}
        self._folders: list[tuple[str, _DiskFolder]] = [("", self._top)]

    def apply(self, call: RecordedCall) -> None:
        if call.failed:
            return
        match call.name, *call.arguments:
            case "mkdir", path, *_:
                if entry := self._parent(path):
                    made = entry[0].now[entry[1]] = _DiskFolder()
                    self._folders.append((self._inside(path) or "", made))
            case "open", path, flags, *_:
                self._open(path, flags, call.result)
            case "write", descriptor, data, *_:
                node = self._descriptors.get(descriptor)
                if isinstance(node, _DiskFile):
                    node.now += data[: call.result]
            case "fsync", descriptor, *_:
                node = self._descriptors.get(descriptor)
                if isinstance(node, _DiskFile):
                    node.flushed = bytes(node.now)
                elif node is not None:
                    node.flushed = dict(node.now)
            case "close", descriptor, *_:
                self._descriptors.pop(descriptor, None)
            case "rename", source, target, *_:
                before, after = self._parent(source), self._parent(target)
                if before is not None and after is not None:
                    after[0].now[after[1]] = before[0].now.pop(before[1])
            case "unlink" | "rmdir", path, *_:
                if entry := self._parent(path):
                    del entry[0].now[entry[1]]

    def pending(self) -> list[tuple[str, str]]:
        """Return (folder, name) of every entry that differs between memory and disk."""
        found = []
        for path, folder in self._folders:
            for name in sorted(folder.now.keys() | folder.flushed.keys()):
                if folder.now.get(name) is not folder.flushed.get(name):
                    found.append((path, name))
        return found

    def disk(self, description: str, survived: frozenset[tuple[str, str]], content: Content) -> Disk:
        files: dict[str, bytes] = {}
        folders: list[str] = []

        def walk(path: str, folder: _DiskFolder) -> None:
            for name in sorted(folder.now.keys() | folder.flushed.keys()):
                node = (folder.now if (path, name) in survived else folder.flushed).get(name)
                where = f"{path}/{name}" if path else name
                if isinstance(node, _DiskFolder):
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

    def _parent(self, path: str) -> tuple[_DiskFolder, str] | None:
        inside = self._inside(path)
        if not inside:
            return None
        folder = self._top
        *above, name = inside.split("/")
        for step in above:
            node = folder.now[step]
            assert isinstance(node, _DiskFolder)
            folder = node
        return folder, name

    def _open(self, path: str, flags: int, descriptor: int) -> None:
        entry = self._parent(path)
        if entry is None:
            if path == self._root:
                self._descriptors[descriptor] = self._top
            return
        folder, name = entry
        node = folder.now.setdefault(name, _DiskFile()) if flags & os.O_CREAT else folder.now[name]
        if isinstance(node, _DiskFile) and flags & os.O_TRUNC:
            node.now = bytearray()
        self._descriptors[descriptor] = node


def _content(file: _DiskFile, content: Content) -> bytes:
    if content == "flushed":
        return file.flushed
    return bytes(file.now if content == "all" else file.now[: (len(file.flushed) + len(file.now)) // 2])
