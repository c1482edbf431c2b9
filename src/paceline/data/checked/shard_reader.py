"""Read checked shards: every record is verified before it is used, and never used when it is wrong.

A record that does not match is read again (from the disk, not from a cache), then from each replica in turn.
When no replica has it, the policy decides: "fail" raises an error that names file, shard and record;
"skip-and-report" leaves the sample out, logs it once, and keeps it in `skipped`.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, final

from torch.utils.data import Dataset

from paceline.core.errors import UsageError
from paceline.core.storage.open_storage import open_storage
from paceline.core.storage.storage import Storage
from paceline.data.checked.shard_format import checksum, entry_at, index_bytes
from paceline.data.checked.shard_manifest import (
    NAME,
    CorruptShardError,
    ManifestDamaged,
    ShardDamage,
    ShardManifest,
)
from paceline.data.record_encoding import from_record
from paceline.data.source_interface import Skipped, SkippedSampleError

_log = logging.getLogger(__name__)

OnCorrupt = Literal["fail", "skip-and-report"]

# An index costs 32 bytes per sample; with the usual shards this bounds them to some tens of megabytes.
_INDICES_KEPT = 1024


@final
class CheckedShards(Dataset[Any]):
    """A map-style dataset over what `write_shards` wrote at `url`; `replicas` are URLs of copies of it."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        replicas: Sequence[str | os.PathLike[str]] = (),
        on_corrupt: OnCorrupt = "fail",
    ) -> None:
        if on_corrupt not in ("fail", "skip-and-report"):
            raise UsageError(f"on_corrupt={on_corrupt!r}", remedy='on_corrupt is "fail" or "skip-and-report"')
        if isinstance(replicas, str | os.PathLike):
            raise UsageError(f"replicas={replicas!r}", remedy=f"write replicas=[{os.fspath(replicas)!r}]")
        self._folders = tuple(open_storage(place, follow_links=True) for place in (url, *replicas))
        self._on_corrupt: OnCorrupt = on_corrupt
        self.manifest = read_manifest(self._folders)
        self._indices: OrderedDict[int, bytearray] = OrderedDict()
        self._lost: dict[int, tuple[ShardDamage, ...]] = {}
        self._skipped: dict[int, Skipped] = {}

    def __len__(self) -> int:
        return self.manifest.samples

    def __getitem__(self, sample: int) -> Any:
        count = len(self)
        if not -count <= sample < count:
            raise IndexError(f"sample {sample} of a dataset of {count}")
        sample %= count
        if sample in self._skipped:
            raise SkippedSampleError(self._skipped[sample].reason)
        shard, record = self.manifest.locate(sample)
        index = self._index(shard)
        if not isinstance(index, bytearray):
            self._give_up(sample, shard, record, index)
        entry = entry_at(index, record)
        data = self._verified(shard, record, entry.offset, entry.length, entry.checksum.hex())
        if not isinstance(data, bytearray):
            self._give_up(sample, shard, record, data)
        return from_record(data)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Samples that this process left out so far, in their order in the dataset."""
        return tuple(self._skipped[sample] for sample in sorted(self._skipped))

    def __getstate__(self) -> dict[str, Any]:
        # What another process finds damaged, it finds itself.
        return {**self.__dict__, "_indices": OrderedDict(), "_lost": {}, "_skipped": {}}

    def _index(self, shard: int) -> bytearray | tuple[ShardDamage, ...]:
        """Return the verified index of a shard, or what is wrong with it at every place."""
        known = self._indices.get(shard)
        if known is not None:
            self._indices.move_to_end(shard)
            return known
        if shard in self._lost:
            return self._lost[shard]
        about = self.manifest.shards[shard]
        length = index_bytes(about.samples)
        index = self._verified(shard, None, about.bytes - length, length, about.index_checksum)
        if not isinstance(index, bytearray):
            # Quarantined: its other samples are not looked for again.
            self._lost[shard] = index
            return index
        self._indices[shard] = index
        if len(self._indices) > _INDICES_KEPT:
            self._indices.popitem(last=False)
        return index

    def _verified(
        self, shard: int, record: int | None, start: int, length: int, expected: str
    ) -> bytearray | tuple[ShardDamage, ...]:
        """Return bytes of this checksum, of a record or (None) of the index: from the first place that has
        them, each asked twice."""
        about = self.manifest.shards[shard]
        damage: list[ShardDamage] = []
        for folder in self._folders:
            for fresh in (False, True):
                try:
                    data = folder.read_range(about.file, start, length, fresh=fresh)
                    reason = _problem(data, length, expected, of_index=record is None)
                except OSError as error:
                    reason = f"it cannot be read ({type(error).__name__}: {error})"
                if not reason:
                    _report_copy(damage, folder)
                    return data
            damage.append(ShardDamage(folder.url, about.file, shard, record, reason))
        return tuple(damage)

    def _give_up(self, sample: int, shard: int, record: int, damage: tuple[ShardDamage, ...]) -> NoReturn:
        about = self.manifest.shards[shard]
        reason = (
            f"sample {sample} (record {record} of shard {shard}, {about.file}) is not what was written, "
            f"at {len(damage)} of {len(self._folders)} places, read twice each: "
            + "; ".join(map(str, damage))
        )
        if self._on_corrupt == "skip-and-report":
            self._skipped[sample] = Skipped(sample, reason)
            _log.error("left out: %s", reason)
            raise SkippedSampleError(reason, sample=sample, shard=shard, record=record, file=about.file)
        raise CorruptShardError(
            reason, damage=damage, sample=sample, shard=shard, record=record, file=about.file
        )


def _problem(data: bytearray, length: int, expected: str, *, of_index: bool) -> str:
    if len(data) != length:
        if of_index:
            return f"its index has {len(data)} of {length} bytes: the file is cut short"
        return f"it has {len(data)} of {length} bytes"
    found = checksum(data).hex()
    if found == expected:
        return ""
    if not of_index:
        return f"its checksum is {found}, written was {expected}"
    what = f"the checksum of its index is {found}, written was {expected}"
    return f"{what}: the index is damaged, or this is another file"


def _report_copy(damage: list[ShardDamage], folder: Storage) -> None:
    if damage:
        _log.warning("%s; used the copy at %s", "; ".join(map(str, damage)), folder.url)


def read_manifest(folders: Sequence[Storage]) -> ShardManifest:
    """Return the manifest of the first place that has a whole one; each is asked twice."""
    damage: list[ShardDamage] = []
    for folder in folders:
        for fresh in (False, True):
            try:
                manifest = ShardManifest.from_json(folder.read(NAME, fresh=fresh))
            except FileNotFoundError:
                reason = "there is none: this is not a checked dataset, or writing it has not ended"
            except OSError as error:
                reason = f"it cannot be read ({type(error).__name__}: {error})"
            except ManifestDamaged as error:
                reason = str(error)
            else:
                _report_copy(damage, folder)
                return manifest
        damage.append(ShardDamage(folder.url, NAME, None, None, reason))
    raise CorruptShardError(
        "no manifest: " + "; ".join(map(str, damage)),
        damage=tuple(damage),
        remedy="check the URL, restore manifest.json from a copy, or pass replicas=[...]",
    )
