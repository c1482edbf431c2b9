"""The manifest of a checked dataset: which files there are and what they must hash to; and words for damage.

One JSON file that carries a checksum of itself. It is written last, so a folder with a manifest is complete.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import xxhash

from paceline.core.errors import PlatformError

NAME = "manifest.json"
_FORMAT = "paceline-shards"
_VERSION = 1


@final
@dataclass(frozen=True)
class ShardRecord:
    """One file: its name, samples and size, and the checksums of all of it and of its index."""

    file: str
    samples: int
    bytes: int
    checksum: str
    index_checksum: str


@final
@dataclass(frozen=True)
class ShardManifest:
    """All files of a dataset, in the order of their samples."""

    shards: tuple[ShardRecord, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((shard.samples for shard in self.shards), initial=0))

    @property
    def samples(self) -> int:
        return self._starts[-1]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the shard that holds a sample, and the number of its record there."""
        shard = bisect_right(self._starts, sample) - 1
        return shard, sample - self._starts[shard]

    def to_json(self) -> bytes:
        plain = {
            "format": _FORMAT,
            "version": _VERSION,
            "samples": self.samples,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return json.dumps({**plain, "checksum": own_checksum(plain)}, indent=1).encode() + b"\n"

    @staticmethod
    def from_json(text: bytes) -> ShardManifest:
        """Return the manifest; raise ManifestDamaged with the reason for bytes that are not a whole one."""
        try:
            plain = json.loads(text)
            claimed = plain.pop("checksum")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ManifestDamaged(
                f"it is not a manifest of {len(text)} bytes of JSON with a checksum ({error})"
            ) from error
        if claimed != own_checksum(plain):
            raise ManifestDamaged(f"its checksum is {own_checksum(plain)} and it says {claimed}")
        if plain.get("format") != _FORMAT or plain.get("version") != _VERSION:
            raise ManifestDamaged(
                f"it is of format {plain.get('format')!r}, version {plain.get('version')!r}; "
                f"this Paceline reads {_FORMAT!r}, version {_VERSION}"
            )
        try:
            manifest = ShardManifest(tuple(_shard(shard) for shard in plain["shards"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestDamaged(f"it does not list its shards ({type(error).__name__}: {error})") from error
        if manifest.samples != plain.get("samples"):
            raise ManifestDamaged(
                f"it says samples={plain.get('samples')!r}, and its shards have {manifest.samples}"
            )
        return manifest


def _shard(plain: dict[str, Any]) -> ShardRecord:
    shard = ShardRecord(**plain)
    numbers = all(type(number) is int and number >= 0 for number in (shard.samples, shard.bytes))
    texts = all(type(text) is str for text in (shard.file, shard.checksum, shard.index_checksum))
    if not numbers or not texts:
        raise ManifestDamaged(f"it describes a shard by values of the wrong kind: {plain}")
    if "/" in shard.file or shard.file.startswith("."):
        raise ManifestDamaged(f"the shard {shard.file!r} lies outside of the manifest's own folder")
    return shard


class ManifestDamaged(Exception):  # noqa: N818 - a reason inside this package, never seen outside
    """Some bytes are not a manifest; the text is the reason."""


@final
@dataclass(frozen=True)
class ShardDamage:
    """Something that is not what was written. `shard` and `record` are None where it is not in one."""

    url: str
    file: str
    shard: int | None
    record: int | None
    reason: str

    def __str__(self) -> str:
        record = "" if self.record is None else f"record {self.record} of "
        where = f"{self.url}/{self.file}"
        return f"{where if self.shard is None else f'{record}shard {self.shard} ({where})'}: {self.reason}"


class CorruptShardError(PlatformError):
    """Bytes of a checked dataset are not what was written, and no replica has them; `damage` lists where."""

    usual_remedy = (
        "restore the file from a copy, pass replicas=[...] to read another one, or "
        'on_corrupt="skip-and-report" to train without these samples'
    )

    def __init__(
        self, message: str, *, damage: tuple[ShardDamage, ...] = (), remedy: str = "", **facts: object
    ) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.damage = damage


def own_checksum(plain: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
