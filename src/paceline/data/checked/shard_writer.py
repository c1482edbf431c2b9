"""Write any data as checked shards: records, index, file by file, and the manifest last.

A folder without a manifest is an unfinished one, and writing again begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import xxhash

from paceline.core.errors import ResourceError, UsageError
from paceline.core.storage.open_storage import open_storage
from paceline.core.storage.storage import Storage
from paceline.core.wording import with_article
from paceline.data.arrays import ArraySource
from paceline.data.checked.shard_format import (
    ALIGNMENT,
    HEAD,
    RecordEntry,
    checksum,
    encode_index,
    encode_sample,
)
from paceline.data.checked.shard_manifest import NAME, ShardManifest, ShardRecord
from paceline.data.map_source import MapSource
from paceline.data.sources import as_source
from paceline.data.stream import Stream
from paceline.data.whole_numbers import whole


def write_shards(data: Any, url: str | os.PathLike[str], *, samples_per_shard: int = 1024) -> ShardManifest:
    """Write every sample of `data` to shard files at `url` and return the manifest.

    `data` is anything that a run can be trained on; samples are written one by one, before any collate. At
    most one shard is in memory. A folder that already has a manifest is refused.
    """
    per_shard = whole("samples_per_shard", samples_per_shard, 1)
    storage = open_storage(url, follow_links=True)
    if storage.size(NAME) is not None:
        raise UsageError(
            f"{storage.url} already holds a checked dataset",
            remedy="write to another folder, or remove this one first",
        )
    storage.make_folder("")
    samples = _samples_of(data)
    shards: list[ShardRecord] = []
    start = 0
    try:
        while record := _write_shard(storage, len(shards), islice(samples, per_shard), start):
            shards.append(record)
            start += record.samples
        manifest = ShardManifest(tuple(shards))
        storage.put(NAME, manifest.to_json())
    except OSError as error:
        raise ResourceError(
            f"shard {len(shards)} of {storage.url} cannot be written: {error}",
            remedy="check that there is space and that the folder may be written to; then write again",
        ) from error
    return manifest


def _write_shard(storage: Storage, number: int, samples: Iterable[Any], first: int) -> ShardRecord | None:
    entries: list[RecordEntry] = []
    pieces: list[bytes] = [HEAD]
    position = len(HEAD)
    for place, sample in enumerate(samples):
        record = encode_sample(sample, first + place)
        padding = -position % ALIGNMENT
        pieces += [bytes(padding), record]
        entries.append(RecordEntry(position + padding, len(record), checksum(record)))
        position += padding + len(record)
    if not entries:
        return None
    index = encode_index(entries, position)
    pieces.append(index)
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    name = f"shard-{number:06d}.plshard"
    storage.put(name, pieces)
    return ShardRecord(name, len(entries), position + len(index), digest.hexdigest(), checksum(index).hex())


def _samples_of(data: Any) -> Iterator[Any]:
    source = as_source(data)
    if isinstance(source, ArraySource | MapSource):
        return (source.sample(number) for number in range(source.size))
    if isinstance(source, Stream):
        return chain.from_iterable(iter(lambda: source.take(1), []))
    raise UsageError(
        f"{with_article(source)} gives batches, and shards hold single samples",
        remedy="pass a dataset, arrays or an iterable",
    )
