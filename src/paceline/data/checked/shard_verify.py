"""Verify a whole checked dataset, and repair damaged files from replicas.

Every byte of every file is covered, not only records. A file that is good is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from paceline.core.errors import PlatformError
from paceline.core.storage.open_storage import open_storage
from paceline.core.storage.storage import Storage
from paceline.data.checked.shard_format import checksum, entry_at, index_bytes
from paceline.data.checked.shard_manifest import (
    NAME,
    CorruptShardError,
    ShardDamage,
    ShardManifest,
    ShardRecord,
)
from paceline.data.checked.shard_reader import read_manifest

_CHUNK: Final = 8 << 20


def verify(url: str | os.PathLike[str]) -> list[ShardDamage]:
    """Return everything at `url` that is not what was written; empty: the dataset is whole."""
    folder = open_storage(url, follow_links=True)
    try:
        manifest = read_manifest([folder])
    except CorruptShardError as error:
        return list(error.damage)
    return [damage for shard in range(len(manifest.shards)) for damage in _check(folder, manifest, shard)]


def repair(url: str | os.PathLike[str], replicas: Sequence[str | os.PathLike[str]]) -> list[ShardDamage]:
    """Replace damaged files at `url` by those of the first replica that has them whole.

    Returns what could not be mended. Files are replaced at once, or not at all.
    """
    folder = open_storage(url, follow_links=True)
    others = [open_storage(place, follow_links=True) for place in replicas]
    manifest = read_manifest([folder, *others])
    try:
        try:
            read_manifest([folder])
        except CorruptShardError:
            folder.put(NAME, manifest.to_json())
        left: list[ShardDamage] = []
        for number, about in enumerate(manifest.shards):
            damage = _check(folder, manifest, number)
            if not damage:
                continue
            good = next((other for other in others if not _check(other, manifest, number)), None)
            if good is None:
                left += damage
            else:
                folder.put(about.file, _chunks(good, about))
                left += _check(folder, manifest, number)
    except OSError as error:
        raise PlatformError(
            f"{folder.url} cannot be mended: {type(error).__name__}: {error}",
            remedy="check that the folder may be written to and has space, then repair again",
        ) from error
    return left


def _digest(folder: Storage, about: ShardRecord) -> str:
    digest = xxhash.xxh3_128()
    for chunk in _chunks(folder, about):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(folder: Storage, about: ShardRecord) -> Iterator[bytearray]:
    for start in range(0, about.bytes, _CHUNK):
        yield folder.read_range(about.file, start, min(_CHUNK, about.bytes - start))


def _check(folder: Storage, manifest: ShardManifest, number: int) -> list[ShardDamage]:
    about = manifest.shards[number]

    def damaged(reason: str, record: int | None = None) -> ShardDamage:
        return ShardDamage(folder.url, about.file, number, record, reason)

    try:
        size = folder.size(about.file)
        if size is None:
            return [damaged("it cannot be read (there is no such file)")]
        if size != about.bytes:
            return [damaged(f"it has {size} bytes and was written with {about.bytes}")]
        found = _digest(folder, about)
        if found == about.checksum:
            return []
        length = index_bytes(about.samples)
        index = folder.read_range(about.file, about.bytes - length, length)
        if checksum(index).hex() != about.index_checksum:
            reason = "its index is not the one that was written, so no record can be told from another"
            return [damaged(reason)]
        records = []
        for record in range(about.samples):
            entry = entry_at(index, record)
            if checksum(folder.read_range(about.file, entry.offset, entry.length)) != entry.checksum:
                records.append(damaged("its checksum is not the one that was written", record))
    except OSError as error:
        return [damaged(f"it cannot be read ({type(error).__name__}: {error})")]
    reason = f"its checksum is {found}, written was {about.checksum}; every record and the index are whole"
    return records or [damaged(reason)]
