"""Reads checked shards: every record is verified before it is used, and never used when it is wrong.

A record that does not match is read again (from the disk, not from a cache), then from each replica in turn.
When nobody has it, the policy decides: "fail" raises an error that names file, shard and record;
"skip-and-report" leaves the sample out, says so once, and keeps it in `skipped`. Must not know who asks for
which sample.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, final

from torch.utils.data import Dataset

from paceline.core.errors import UsageError
from paceline.data.batches import Skipped, SkippedSampleError
from paceline.data.checked.layout import checksum, entry_at, index_bytes
from paceline.data.checked.manifest import NAME, CorruptShardError, Damage, Manifest, ManifestDamaged
from paceline.data.checked.storage import Folder
from paceline.data.records import from_record

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
        self._folders = tuple(Folder.at(place) for place in (url, *replicas))
        self._on_corrupt: OnCorrupt = on_corrupt
        self.manifest = read_manifest(self._folders)
        self._indices: OrderedDict[int, bytearray] = OrderedDict()
        self._lost: dict[int, tuple[Damage, ...]] = {}
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
        digest = entry.checksum

        def problem(data: bytearray) -> str:
            if len(data) != entry.length:
                return f"it has {len(data)} of {entry.length} bytes"
            found = checksum(data)
            return "" if found == digest else f"its checksum is {found.hex()}, written was {digest.hex()}"

        data = self._verified(shard, record, entry.offset, entry.length, problem)
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

    def _index(self, shard: int) -> bytearray | tuple[Damage, ...]:
        """The verified index of a shard, or what is wrong with it at every place."""
        known = self._indices.get(shard)
        if known is not None:
            self._indices.move_to_end(shard)
            return known
        if shard in self._lost:
            return self._lost[shard]
        about = self.manifest.shards[shard]
        length = index_bytes(about.samples)

        def problem(data: bytearray) -> str:
            if len(data) != length:
                return f"its index has {len(data)} of {length} bytes: the file is cut short"
            found = checksum(data).hex()
            if found == about.index_checksum:
                return ""
            return (
                f"the checksum of its index is {found}, written was {about.index_checksum}: "
                "the index is damaged, or this is another file"
            )

        index = self._verified(shard, None, about.bytes - length, length, problem)
        if not isinstance(index, bytearray):
            # Quarantined: its other samples are not looked for again.
            self._lost[shard] = index
            return index
        self._indices[shard] = index
        if len(self._indices) > _INDICES_KEPT:
            self._indices.popitem(last=False)
        return index

    def _verified(
        self, shard: int, record: int | None, start: int, length: int, problem: Callable[[bytearray], str]
    ) -> bytearray | tuple[Damage, ...]:
        """Bytes without a problem: from the first place that has them, each asked twice."""
        about = self.manifest.shards[shard]
        damage: list[Damage] = []
        for folder in self._folders:
            for fresh in (False, True):
                try:
                    data = folder.read(about.file, start, length, fresh=fresh)
                    reason = problem(data)
                except OSError as error:
                    reason = f"it cannot be read ({type(error).__name__}: {error})"
                if not reason:
                    self._say_where_it_was_found(damage, folder)
                    return data
            damage.append(Damage(folder.url, about.file, shard, record, reason))
        return tuple(damage)

    def _say_where_it_was_found(self, damage: list[Damage], folder: Folder) -> None:
        if damage:
            _log.warning("%s; used the copy at %s", "; ".join(map(str, damage)), folder.url)

    def _give_up(self, sample: int, shard: int, record: int, damage: tuple[Damage, ...]) -> NoReturn:
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


def read_manifest(folders: Sequence[Folder]) -> Manifest:
    """The manifest of the first place that has a whole one; each is asked twice."""
    damage: list[Damage] = []
    for folder in folders:
        for fresh in (False, True):
            try:
                manifest = Manifest.from_json(bytes(folder.read_all(NAME, fresh=fresh)))
            except FileNotFoundError:
                reason = "there is none: this is not a checked dataset, or writing it has not ended"
            except OSError as error:
                reason = f"it cannot be read ({type(error).__name__}: {error})"
            except ManifestDamaged as error:
                reason = str(error)
            else:
                if damage:
                    _log.warning("%s; used the copy at %s", "; ".join(map(str, damage)), folder.url)
                return manifest
        damage.append(Damage(folder.url, NAME, None, None, reason))
    raise CorruptShardError(
        "no manifest: " + "; ".join(map(str, damage)),
        damage=tuple(damage),
        remedy="check the URL, restore manifest.json from a copy, or pass replicas=[...]",
    )
