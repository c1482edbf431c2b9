"""A checkpoint from its files, verified: what was checked is what is handed out, read once into memory.

Must not know how checkpoints are chosen, nor how they come to be.
"""

from __future__ import annotations

import errno
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import xxhash

from paceline.checkpoint import state_json, tensor_file
from paceline.checkpoint.documents import BrokenDocument, UnknownFormat
from paceline.checkpoint.manifest import (
    MANIFEST,
    OWNER,
    STATE,
    Damage,
    FileRecord,
    Kind,
    Manifest,
    folder_name,
)
from paceline.checkpoint.regions import memory
from paceline.checkpoint.storage import TEMPORARY, Storage

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK: Final = 16 << 20


# What the file itself is, and not whether it may be read: something else lies where a file was written.
_NOT_A_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


class _Broken(Exception):  # noqa: N818 - a finding, turned into a Damage below
    kind: Kind = "damaged"


class _Unreadable(_Broken):
    kind: Kind = "unreadable"


def kind_of(error: OSError) -> Kind:
    """Whether an error while reading says that the file is not what was written, or only that it cannot be
    read here and now (EACCES, EIO, ESTALE, a server that answers 403 or 500)."""
    return "damaged" if error.errno in _NOT_A_FILE else "unreadable"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    manifest: Manifest
    state: dict[str, Any]
    images: tuple[mmap.mmap, ...] = field(repr=False, default=())

    @property
    def version(self) -> int:
        return self.manifest.version

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, in name order. They are views of this checkpoint's memory, not copies."""
        import torch

        from paceline.checkpoint.images import view_of

        found: dict[str, Tensor] = {}
        for image, record in zip(self.images, self.manifest.parts, strict=True):
            data = torch.frombuffer(image, dtype=torch.uint8, count=record.nbytes)
            for entry in tensor_file.parse(memoryview(image)[: record.nbytes]):
                found[entry.name] = view_of(data, entry)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Examined:
    """What was found in a checkpoint's folder. `gone`: it was deleted, perhaps while it was being read."""

    checkpoint: Checkpoint | None
    damage: tuple[Damage, ...]
    gone: bool = False


def examine(storage: Storage, version: int, *, keep: bool) -> Examined:
    """Check every byte of a checkpoint; with `keep` its content is in the answer when all is well.

    Without it the memory needed is one chunk, however large the files are.
    """
    folder = folder_name(version)
    manifest, damage = read_manifest(storage, version)
    if manifest is None:
        return Examined(None, damage, gone=not damage)
    found: list[Damage] = []
    contents: dict[str, mmap.mmap] = {}
    for record in manifest.files:
        try:
            contents[record.name] = _read(storage, f"{folder}/{record.name}", record, manifest, keep)
        except _Broken as error:
            found.append(Damage(version, f"{folder}/{record.name}", str(error), error.kind))
    state: dict[str, Any] = {}
    if not found:
        try:
            state = _check_contents(manifest, contents, keep)
        except _Broken as error:
            found.append(Damage(version, folder, str(error)))
    good = not found
    known = {file.name for file in manifest.files} | {MANIFEST}
    # What a save that was killed left of its manifest is no stranger's.
    for name in sorted(set(storage.names(folder)) - known - {MANIFEST + TEMPORARY, OWNER}):
        found.append(Damage(version, f"{folder}/{name}", "is not in the manifest"))
    if found and _is_gone(storage, f"{folder}/{MANIFEST}"):
        return Examined(None, (), gone=True)
    if not good:
        return Examined(None, tuple(found))
    images = tuple(contents[file.name] for file in manifest.parts)
    # A stranger's file beside good ones is told, and harms nobody.
    return Examined(Checkpoint(manifest, state, images if keep else ()), tuple(found))


def read_manifest(storage: Storage, version: int) -> tuple[Manifest | None, tuple[Damage, ...]]:
    """A version's manifest, or what is wrong with it; neither when there is none."""
    path = f"{folder_name(version)}/{MANIFEST}"
    try:
        manifest = Manifest.from_bytes(storage.read(path))
    except FileNotFoundError:
        return None, ()
    except BrokenDocument as error:
        return None, (Damage(version, path, str(error)),)
    except UnknownFormat as error:
        return None, (Damage(version, path, str(error), "unknown format"),)
    except OSError as error:
        return None, (Damage(version, path, f"cannot be read: {error.strerror or error}", kind_of(error)),)
    if manifest.version != version:
        return None, (Damage(version, path, f"belongs to version {manifest.version}, not to {version}"),)
    return manifest, ()


def _is_gone(storage: Storage, path: str) -> bool:
    try:
        return storage.size(path) is None
    except OSError:
        return False


def _read(storage: Storage, path: str, record: FileRecord, manifest: Manifest, keep: bool) -> mmap.mmap:
    """The file's memory (a chunk of it, unless it is to be kept); _Broken says what is wrong with it."""
    keep = keep or record.name == STATE
    try:
        size = storage.size(path)
        if size is None:
            raise _Broken("is missing")
        if size != record.nbytes:
            kind = "cut off" if size < record.nbytes else "too long"
            raise _Broken(f"is {kind}: it has {size} bytes, and {record.nbytes} were written")
        region = memory(record.nbytes if keep else min(record.nbytes, _CHUNK))
        hasher = xxhash.xxh3_128()
        for start in range(0, record.nbytes, _CHUNK):
            length = min(_CHUNK, record.nbytes - start)
            place = start if keep else 0
            with memoryview(region)[place : place + length] as view:
                count = storage.read_into(path, view, start)
                hasher.update(view[:count])
            if count != length:
                raise _Broken(f"is cut off: it has {start + count} bytes, and {record.nbytes} were written")
    except FileNotFoundError:
        raise _Broken("is missing") from None
    except OSError as error:
        broken = _Broken if kind_of(error) == "damaged" else _Unreadable
        raise broken(f"cannot be read: {error.strerror or error}") from None
    if hasher.hexdigest() != record.checksum:
        raise _Broken(_mismatch(hasher.hexdigest(), record, manifest))
    return region


def _mismatch(digest: str, record: FileRecord, manifest: Manifest) -> str:
    for other in manifest.files:
        if other.checksum == digest:
            return f"holds what {other.name} should hold"
    return f"is damaged: its {record.nbytes} bytes have checksum {digest}, and {record.checksum} was written"


def _check_contents(manifest: Manifest, contents: dict[str, mmap.mmap], keep: bool) -> dict[str, Any]:
    """The state, when files that are whole also make sense together."""
    if STATE not in contents:
        raise _Broken("has no state")
    holder: dict[str, str] = {}
    for record in manifest.parts if keep else ():
        try:
            entries = tensor_file.parse(memoryview(contents[record.name])[: record.nbytes])
        except ValueError as error:
            raise _Broken(f"is not as it was meant: {record.name} {error}") from None
        for entry in entries:
            if entry.name in holder:
                raise _Broken(f"has {entry.name!r} twice, in {holder[entry.name]} and {record.name}")
            holder[entry.name] = record.name
    size = next(file.nbytes for file in manifest.files if file.name == STATE)
    try:
        return state_json.decode(contents[STATE][:size])
    except ValueError as error:
        raise _Broken(f"is not as it was meant: {STATE}: {error}") from None
