"""Writes any data as checked shards: records, index, file by file, and the manifest last.

A folder without a manifest is an unfinished one, and writing again begins anew. Must not know who reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import xxhash

from paceline.core.errors import ResourceError, UsageError
from paceline.core.words import a_kind
from paceline.data.arguments import whole
from paceline.data.arrays import ArraySource
from paceline.data.checked.layout import ALIGNMENT, HEAD, Entry, checksum, encode_index, encode_sample
from paceline.data.checked.manifest import NAME, Manifest, ShardRecord
from paceline.data.checked.storage import Folder
from paceline.data.iterables import Stream
from paceline.data.mapped import MapSource
from paceline.data.sources import as_source


def write_shards(data: Any, url: str | os.PathLike[str], *, samples_per_shard: int = 1024) -> Manifest:
    """Write every sample of `data` to shard files at `url` and return the manifest.

    `data` is anything that a run can be trained on; samples are written one by one, before any collate. At
    most one shard is in memory. A folder that already has a manifest is refused.
    """
    per_shard = whole("samples_per_shard", samples_per_shard, 1)
    folder = Folder.at(url)
    if folder.exists(NAME):
        raise UsageError(
            f"{folder.url} already holds a checked dataset",
            remedy="write to another folder, or remove this one first",
        )
    samples = _samples_of(data)
    shards: list[ShardRecord] = []
    start = 0
    try:
        while True:
            record = _write_shard(folder, len(shards), islice(samples, per_shard), start)
            if record is None:
                break
            shards.append(record)
            start += record.samples
        manifest = Manifest(tuple(shards))
        folder.write(NAME, [manifest.to_json()])
    except OSError as error:
        raise ResourceError(
            f"shard {len(shards)} of {folder.url} cannot be written: {error}",
            remedy="check that there is space and that the folder may be written to; then write again",
        ) from error
    return manifest


def _write_shard(folder: Folder, number: int, samples: Iterable[Any], first: int) -> ShardRecord | None:
    entries: list[Entry] = []
    pieces: list[bytes] = [HEAD]
    position = len(HEAD)
    for place, sample in enumerate(samples):
        record = encode_sample(sample, first + place)
        padding = -position % ALIGNMENT
        pieces += [bytes(padding), record]
        entries.append(Entry(position + padding, len(record), checksum(record)))
        position += padding + len(record)
    if not entries:
        return None
    index = encode_index(entries, position)
    pieces.append(index)
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    name = f"shard-{number:06d}.plshard"
    folder.write(name, pieces)
    return ShardRecord(name, len(entries), position + len(index), digest.hexdigest(), checksum(index).hex())


def _samples_of(data: Any) -> Iterator[Any]:
    source = as_source(data)
    if isinstance(source, ArraySource):
        return (source.sample(number) for number in range(source.size))
    if isinstance(source, Stream):
        return _drawn(source)
    if isinstance(source, MapSource):
        return (source.sample(number) for number in range(source.size))
    raise UsageError(
        f"{a_kind(source)} gives batches, and shards hold single samples",
        remedy="pass a dataset, arrays or an iterable",
    )


def _drawn(stream: Stream) -> Iterator[Any]:
    while samples := stream.take(1):
        yield samples[0]
