"""Looks through a whole checked dataset for damage, and mends files from replicas.

Every byte of every file is covered, not only records. A file that is good is not changed. Must not know who
reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import xxhash

from paceline.core.errors import PlatformError
from paceline.data.checked.layout import checksum, entry_at, index_bytes
from paceline.data.checked.manifest import NAME, CorruptShardError, Damage, Manifest, ShardRecord
from paceline.data.checked.reader import read_manifest
from paceline.data.checked.storage import Folder


def verify(url: str | os.PathLike[str]) -> list[Damage]:
    """Everything at `url` that is not what was written; empty: the dataset is whole."""
    folder = Folder.at(url)
    try:
        manifest = read_manifest([folder])
    except CorruptShardError as error:
        return list(error.damage)
    return [damage for shard in range(len(manifest.shards)) for damage in _check(folder, manifest, shard)]


def repair(url: str | os.PathLike[str], replicas: Sequence[str | os.PathLike[str]]) -> list[Damage]:
    """Replaces damaged files at `url` by those of the first replica that has them whole.

    Returns what could not be mended. Files are replaced at once, or not at all.
    """
    folder = Folder.at(url)
    others = [Folder.at(place) for place in replicas]
    manifest = read_manifest([folder, *others])
    try:
        if verify_manifest(folder):
            folder.write(NAME, [manifest.to_json()])
        left: list[Damage] = []
        for number, about in enumerate(manifest.shards):
            damage = _check(folder, manifest, number)
            if not damage:
                continue
            good = next((other for other in others if _is_whole(other, about)), None)
            if good is None:
                left += damage
            else:
                folder.write(about.file, good.chunks(about.file))
                left += _check(folder, manifest, number)
    except OSError as error:
        raise PlatformError(
            f"{folder.url} cannot be mended: {type(error).__name__}: {error}",
            remedy="check that the folder may be written to and has space, then repair again",
        ) from error
    return left


def verify_manifest(folder: Folder) -> tuple[Damage, ...]:
    try:
        read_manifest([folder])
    except CorruptShardError as error:
        return error.damage
    return ()


def _is_whole(folder: Folder, about: ShardRecord) -> bool:
    try:
        return folder.size(about.file) == about.bytes and _digest(folder, about) == about.checksum
    except OSError:
        return False


def _digest(folder: Folder, about: ShardRecord) -> str:
    digest = xxhash.xxh3_128()
    for chunk in folder.chunks(about.file):
        digest.update(chunk)
    return digest.hexdigest()


def _check(folder: Folder, manifest: Manifest, number: int) -> list[Damage]:
    about = manifest.shards[number]

    def damaged(reason: str, record: int | None = None) -> Damage:
        return Damage(folder.url, about.file, number, record, reason)

    try:
        size = folder.size(about.file)
        if size != about.bytes:
            return [damaged(f"it has {size} bytes and was written with {about.bytes}")]
        found = _digest(folder, about)
        if found == about.checksum:
            return []
        length = index_bytes(about.samples)
        index = folder.read(about.file, about.bytes - length, length)
        if checksum(index).hex() != about.index_checksum:
            return [
                damaged("its index is not the one that was written, so no record can be told from another")
            ]
        records = []
        for record in range(about.samples):
            entry = entry_at(index, record)
            if checksum(folder.read(about.file, entry.offset, entry.length)) != entry.checksum:
                records.append(damaged("its checksum is not the one that was written", record))
    except OSError as error:
        return [damaged(f"it cannot be read ({type(error).__name__}: {error})")]
    return records or [
        damaged(
            f"its checksum is {found}, written was {about.checksum}; every record and the index are whole"
        )
    ]
