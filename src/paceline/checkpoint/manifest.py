"""The manifest of a checkpoint: its files with length and checksum, and the moment of the run.

Plain values that survive any wire.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from paceline.checkpoint.checksummed_json import (
    BrokenDocument,
    UnknownFormat,
    decode_document,
    encode_document,
)
from paceline.core.errors import PlatformError, UsageError
from paceline.core.type_conversion import finite
from paceline.core.untrusted import printable

FORMAT: Final = "paceline-checkpoint-1"
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
OWNER: Final = "owner.json"
MODEL: Final = "model/"  # the names of the weights begin so

_LAST_TIME: Final = 2.5e11  # seconds since 1970: about the year 9900, the last that a date can be shown of
_FOLDER: Final = re.compile(r"v(\d{8,})")
_PART: Final = re.compile(r"part-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class FileRecord:
    """One file: how many tensors it holds, the names of those that only its writer had, and whether the
    model's are all finite (None: written before that was noted)."""

    name: str
    nbytes: int
    checksum: str
    tensors: int = 0
    own: tuple[str, ...] = ()
    finite: bool | None = None

    def to_plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "xxh3_128": self.checksum,
            "tensors": self.tensors,
            "own": list(self.own),
            **({} if self.finite is None else {"finite": self.finite}),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FileRecord:
        name = str(plain["name"])
        if name != STATE and _PART.fullmatch(name) is None:
            # Read, it would be a file outside of the version's folder.
            raise ValueError(f"{name[:80]!r} is not the name of a checkpoint's file")
        return cls(
            name,
            int(plain["bytes"]),
            str(plain["xxh3_128"]),
            int(plain["tensors"]),
            tuple(str(name) for name in plain["own"]),
            None if plain.get("finite") is None else bool(plain["finite"]),
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Moment and run of a checkpoint; `parent` is the version the run loaded or saved before.

    `run` is the run's own mark, the same in all its versions: only those does its retention delete.
    """

    step: int
    epoch: int = 0
    samples: int = 0
    workers: int = 1
    parent: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    run: str = ""


@dataclass(frozen=True)
class CheckpointManifest:
    """A committed checkpoint, without its tensors. `created` is in seconds since 1970."""

    version: int
    created: float
    info: CheckpointInfo
    files: tuple[FileRecord, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def parts(self) -> tuple[FileRecord, ...]:
        return tuple(file for file in self.files if file.name != STATE)

    @property
    def finite(self) -> bool | None:
        """Return whether all weights are finite; None where that is not known."""
        known = [file.finite for file in self.parts]
        return False if False in known else None if None in known else True

    def to_bytes(self) -> bytes:
        metrics = {name: finite(float(value)) for name, value in sorted(self.info.metrics.items())}
        body = {
            "format": FORMAT,
            "version": self.version,
            "created": self.created,
            **vars(self.info),
            "metrics": metrics,
            "files": [file.to_plain() for file in self.files],
        }
        return encode_document(body)

    @classmethod
    def from_bytes(cls, raw: bytes) -> CheckpointManifest:
        """Return the manifest in a file; BrokenDocument has the reason where it is damaged, UnknownFormat
        where it may be well and was not written for this Paceline."""
        body = decode_document(raw)
        if body.get("format") != FORMAT:
            # The body matched its checksum: another Paceline wrote it so.
            raise UnknownFormat(f"has the format {body.get('format')!r}, and only {FORMAT!r} is known here")
        try:
            counts = {name: body[name] for name in ("step", "epoch", "samples", "workers", "parent")}
            metrics = {name: float(value) for name, value in body["metrics"].items()}
            note, run = str(body["note"]), str(body.get("run", ""))
            info = CheckpointInfo(**counts, metrics=metrics, note=note, run=run)
            files = tuple(FileRecord.from_plain(file) for file in body["files"])
            created = float(body["created"])
            whole = (body["version"], *{**counts, "parent": info.parent or 0}.values())
            if not 0 <= created < _LAST_TIME or any(type(number) is not int for number in whole):
                raise ValueError("a number or a time that no checkpoint has")
            return cls(body["version"], created, info, files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BrokenDocument(f"lacks or misspells a field: {error!r}") from None


DamageKind = Literal["damaged", "unreadable", "unknown format"]
"""damaged: the bytes are not those that were written, so an older version is the best there is. unreadable:
permissions, the disk or the server refuse; unknown format: another Paceline wrote it. These two prove nothing
about the bytes: the version may be well, and to continue from an older one would throw it away."""


@dataclass(frozen=True)
class CheckpointDamage:
    """A file (relative to the checkpoints' folder) that was changed since, or that cannot be read here."""

    version: int | None
    file: str
    problem: str
    kind: DamageKind = "damaged"

    def __str__(self) -> str:
        # For logs and errors, which reach terminals: the names of files may come from elsewhere.
        return printable(f"{self.file} {self.problem}")


class _CheckpointError(PlatformError):
    def __init__(self, message: str, *, damage: tuple[CheckpointDamage, ...] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.damage = damage

    def _body(self) -> str:
        return "\n".join([self.message, *(f"  {damage}" for damage in self.damage)])


class DamagedCheckpointError(_CheckpointError):
    """A checkpoint that was asked for by name does not verify; `damage` names each file and what is wrong."""

    usual_remedy = "load an older version (`paceline checkpoint ls` shows them), or let resume='auto' find it"


class UnreadableCheckpointError(_CheckpointError):
    """Checkpoints are there and cannot be read here, or are of a format that is not known here: nothing shows
    that they are damaged. `damage` names each file and why."""

    usual_remedy = (
        "see that they can be read (permissions, the disk, the key for the server), or use the Paceline that "
        "wrote them"
    )


def folder_name(version: int) -> str:
    return f"v{version:08d}"


def version_of(folder: str) -> int | None:
    """Return the version a folder's name stands for; None when it is not a checkpoint's folder."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match is not None and folder == folder_name(int(match[1])) else None


def part_name(part: int, parts: int) -> str:
    width = max(2, len(str(parts)))
    return f"part-{part:0{width}d}-of-{parts:0{width}d}.safetensors"


def check_complete(version: int, files: tuple[FileRecord, ...]) -> None:
    """Refuse a set of files that is not one state and every part exactly once."""
    names = [file.name for file in files]
    parts = [match for name in names if (match := _PART.fullmatch(name))]
    expected = {part_name(part, len(parts)) for part in range(len(parts))} | {STATE}
    if not parts or len(set(names)) != len(names) or set(names) != expected:
        raise UsageError(
            f"checkpoint {version} cannot be committed with the files {sorted(names)}",
            remedy="give the records of every writer: each part once, and one state",
        )
    holder: dict[str, str] = {}
    for file in files:
        for name in file.own:
            if holder.setdefault(name, file.name) != file.name:
                raise UsageError(
                    f"checkpoint {version} would hold {name!r} twice, in {holder[name]} and {file.name}",
                    remedy="give what a rank has for itself a name that has its rank or shard in it",
                )


def check_info(info: CheckpointInfo) -> None:
    """Refuse what could not be read back."""
    for name, number in (("step", info.step), ("epoch", info.epoch), ("samples", info.samples)):
        if type(number) is not int or number < 0:
            raise UsageError(f"Info({name}={number!r}) is not a count", remedy=f"give {name} as an int >= 0")
    for name, value in info.metrics.items():
        if not isinstance(value, int | float):
            raise UsageError(
                f"metric {name!r} is of type {type(value).__name__}", remedy="give metrics as Python numbers"
            )
