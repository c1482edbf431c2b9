"""A checkpoint from its files, verified: what was checked is what is handed out, read once into memory.

A run resumes from the newest checkpoint that is whole, and never from a guess. A damaged version is passed
over: an older one is the best there is. One that cannot be read here (permissions, a disk, a server) or whose
format is not known is no such version: it may be well, so that going back behind it, or to the beginning, is
refused.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash

from paceline.checkpoint import state_json, tensor_file
from paceline.checkpoint.checksummed_json import BrokenDocument, UnknownFormat
from paceline.checkpoint.manifest import (
    MANIFEST,
    OWNER,
    STATE,
    CheckpointDamage,
    CheckpointManifest,
    DamagedCheckpointError,
    DamageKind,
    FileRecord,
    UnreadableCheckpointError,
    folder_name,
)
from paceline.checkpoint.tensor_file import image_memory
from paceline.core.atomic_file import TEMPORARY
from paceline.core.storage.storage import Storage

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_CHUNK: Final = 16 << 20

# What the file itself is, and not whether it may be read: something else lies where a file was written.
_NOT_A_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


class _Broken(Exception):  # noqa: N818 - a finding, turned into a Damage below
    def __init__(self, problem: str, kind: DamageKind = "damaged") -> None:
        super().__init__(problem)
        self.kind = kind


def _kind_of(error: OSError) -> DamageKind:
    """Tell a file that is not what was written from one that cannot be read here and now (EACCES, EIO,
    ESTALE, a server that answers 403 or 500)."""
    return "damaged" if error.errno in _NOT_A_FILE else "unreadable"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    manifest: CheckpointManifest
    state: dict[str, Any]
    images: tuple[mmap.mmap, ...] = field(repr=False, default=())

    @property
    def version(self) -> int:
        return self.manifest.version

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, in name order: views of this checkpoint's memory, not copies."""
        import torch

        from paceline.checkpoint.staging_buffer import view_of

        found: dict[str, Tensor] = {}
        for image, record in zip(self.images, self.manifest.parts, strict=True):
            data = torch.frombuffer(image, dtype=torch.uint8, count=record.nbytes)
            for entry in tensor_file.parse(memoryview(image)[: record.nbytes]):
                found[entry.name] = view_of(data, entry)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class ExaminedCheckpoint:
    """Findings in a checkpoint's folder. `gone`: it was deleted, perhaps while it was being read."""

    checkpoint: Checkpoint | None
    damage: tuple[CheckpointDamage, ...]
    gone: bool = False


def examine(storage: Storage, version: int, *, keep: bool) -> ExaminedCheckpoint:
    """Check every byte of a checkpoint; with `keep` its content is in the answer when all is well.

    Without it the memory needed is one chunk, however large the files are.
    """
    folder = folder_name(version)
    manifest, damage = read_manifest(storage, version)
    if manifest is None:
        return ExaminedCheckpoint(None, damage, gone=not damage)
    found: list[CheckpointDamage] = []
    contents: dict[str, mmap.mmap] = {}
    for record in manifest.files:
        try:
            contents[record.name] = _read(storage, f"{folder}/{record.name}", record, manifest, keep)
        except _Broken as error:
            found.append(CheckpointDamage(version, f"{folder}/{record.name}", str(error), error.kind))
    state: dict[str, Any] = {}
    if not found:
        try:
            state = _check_contents(manifest, contents, keep)
        except _Broken as error:
            found.append(CheckpointDamage(version, folder, str(error)))
    good = not found
    known = {file.name for file in manifest.files} | {MANIFEST}
    # What a save that was killed left of its manifest is no stranger's.
    for name in sorted(set(storage.names(folder)) - known - {MANIFEST + TEMPORARY, OWNER}):
        found.append(CheckpointDamage(version, f"{folder}/{name}", "is not in the manifest"))
    if found and not has_manifest(storage, version):
        return ExaminedCheckpoint(None, (), gone=True)
    if not good:
        return ExaminedCheckpoint(None, tuple(found))
    images = tuple(contents[file.name] for file in manifest.parts)
    # An unknown file beside good ones is reported, and does no harm.
    return ExaminedCheckpoint(Checkpoint(manifest, state, images if keep else ()), tuple(found))


def read_manifest(
    storage: Storage, version: int
) -> tuple[CheckpointManifest | None, tuple[CheckpointDamage, ...]]:
    """Return a version's manifest, or what is wrong with it; neither when there is none."""
    path = f"{folder_name(version)}/{MANIFEST}"
    manifest, damage = read_document(storage, path, CheckpointManifest.from_bytes, version)
    if manifest is not None and manifest.version != version:
        problem = f"belongs to version {manifest.version}, not to {version}"
        return None, (CheckpointDamage(version, path, problem),)
    return manifest, damage


def read_document(
    storage: Storage, path: str, decode: Callable[[bytes], T], version: int | None = None
) -> tuple[T | None, tuple[CheckpointDamage, ...]]:
    """Return what a small file holds, or what is wrong with it; neither when there is none."""
    try:
        return decode(storage.read(path)), ()
    except FileNotFoundError:
        return None, ()
    except BrokenDocument as error:
        return None, (CheckpointDamage(version, path, str(error)),)
    except UnknownFormat as error:
        return None, (CheckpointDamage(version, path, str(error), "unknown format"),)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        return None, (CheckpointDamage(version, path, problem, _kind_of(error)),)


def has_manifest(storage: Storage, version: int) -> bool:
    try:
        return storage.size(f"{folder_name(version)}/{MANIFEST}") is not None
    except OSError:
        # It may be there: reading decides, and nothing is deleted on a guess.
        return True


def _read(
    storage: Storage, path: str, record: FileRecord, manifest: CheckpointManifest, keep: bool
) -> mmap.mmap:
    """Return the file's memory (a chunk of it, unless `keep`); _Broken has the reason why it is not good."""
    keep = keep or record.name == STATE
    try:
        size = storage.size(path)
        if size is None:
            raise _Broken("is missing")
        if size != record.nbytes:
            kind = "cut off" if size < record.nbytes else "too long"
            raise _Broken(f"is {kind}: it has {size} bytes, and {record.nbytes} were written")
        region = image_memory(record.nbytes if keep else min(record.nbytes, _CHUNK))
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
        raise _Broken(f"cannot be read: {error.strerror or error}", _kind_of(error)) from None
    if hasher.hexdigest() != record.checksum:
        digest = hasher.hexdigest()
        other = next((file.name for file in manifest.files if file.checksum == digest), None)
        has = f"its {record.nbytes} bytes have checksum {digest}, and {record.checksum} was written"
        raise _Broken(f"is damaged: {has}" if other is None else f"holds what {other} should hold")
    return region


def _check_contents(
    manifest: CheckpointManifest, contents: dict[str, mmap.mmap], keep: bool
) -> dict[str, Any]:
    """Return the state, when files that are whole also make sense together."""
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


def newest_good(
    storage: Storage,
    versions: Callable[[], list[int]],
    report: Callable[[Iterable[CheckpointDamage]], None],
    at_most_step: int | None = None,
) -> Checkpoint | None:
    """Return the newest committed version that verifies; None where none (of at most that step) is."""
    bad: dict[int, tuple[CheckpointDamage, ...]] = {}
    late: set[int] = set()
    while True:
        before = versions()
        candidates = [version for version in reversed(before) if version not in bad and version not in late]
        for version in candidates:
            if at_most_step is not None:
                manifest, _ = read_manifest(storage, version)
                if manifest is not None and manifest.info.step > at_most_step:
                    late.add(version)
                    continue
            examined = examine(storage, version, keep=True)
            if examined.checkpoint is not None:
                report(examined.damage)
                return examined.checkpoint
            if examined.gone:
                continue
            bad[version] = examined.damage
            if any(item.kind != "damaged" for item in examined.damage):
                raise _unreadable(storage, bad, [other for other in candidates if other < version])
            report(examined.damage)
        # One that was deleted while it was looked at has made room for a newer one: look again.
        if not candidates and versions() == before:
            break
    if bad:
        many = f"each of the {len(bad)} checkpoints" if len(bad) > 1 else "the only checkpoint"
        raise DamagedCheckpointError(
            f"{many} in {storage.url} is damaged:",
            damage=_listed(bad),
            remedy="bring a version back from a copy, or begin a new run in another folder",
        )
    return None


def _listed(bad: Mapping[int, tuple[CheckpointDamage, ...]]) -> tuple[CheckpointDamage, ...]:
    return tuple(item for items in bad.values() for item in items)


def _unreadable(
    storage: Storage, bad: Mapping[int, tuple[CheckpointDamage, ...]], older: Iterable[int]
) -> UnreadableCheckpointError:
    """Return the error about the last of `bad`, with what the manifests of those before it hold."""
    found, readable = list(_listed(bad)), []
    for version in older:
        manifest, damage = read_manifest(storage, version)
        found += damage
        if manifest is not None:
            readable.append(f"resume={version} of step {manifest.info.step}")
    back = f"; or name an older version to go back to: {', '.join(readable)}" if readable else ""
    return UnreadableCheckpointError(
        f"checkpoint {min(bad)} in {storage.url} cannot be read here, and nothing says that it is damaged:",
        damage=tuple(found),
        remedy=UnreadableCheckpointError.usual_remedy + back,
    )
