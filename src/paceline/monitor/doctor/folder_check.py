"""Check of a folder for checkpoints: can it be written, does what was flushed stay, how fast is that, how
much room is there. Writes one small file, and deletes it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.core import atomic_file
from paceline.core.available_resources import read_text
from paceline.core.errors import PacelineError
from paceline.core.storage.open_storage import open_storage
from paceline.monitor.doctor.finding import DoctorFinding, ok, warning, wrong

_TOPIC: Final = "checkpoints"
_SAMPLE: Final = b"paceline doctor\n" * 256
_SLOW_SECONDS: Final = 0.25
_LEAST_BYTES: Final = 1 << 30
_IN_MEMORY: Final = ("tmpfs", "ramfs")


def look_at_folder(where: str) -> Iterator[DoctorFinding]:
    """Look at a folder, or at a URL such as s3://bucket/run, in which checkpoints shall be kept."""
    if "://" in where and not where.startswith(("file://", "local://")):
        yield _look_at_url(where)
        return
    folder = Path(where.partition("://")[2] or where).absolute()
    begun = time.monotonic()
    made: list[Path] = []
    try:
        made = _missing_parents(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f".paceline-doctor-{os.getpid()}"
        try:
            atomic_file.replace(file, [_SAMPLE], durable=True)
            if file.read_bytes() != _SAMPLE:
                yield wrong(
                    _TOPIC, f"{folder} gives back other bytes than were written", "choose another disk"
                )
                return
        finally:
            file.unlink(missing_ok=True)
        seconds = time.monotonic() - begun
        kind, free = file_system(folder), shutil.disk_usage(folder).free
    except OSError as error:
        yield wrong(
            _TOPIC,
            f"{error.filename or folder} cannot be written: {error.strerror}",
            "check the path, its permissions and the disk's space, or choose another folder",
        )
        return
    finally:
        for path in made:  # only what was made here, and is empty again
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    yield judge_folder(str(folder), kind, free, seconds)


def judge_folder(folder: str, kind: str, free: int, seconds: float) -> DoctorFinding:
    """Judge a folder that can be written: its file system, its room, the time that a flushed file took."""
    text = f"{folder} ({kind or 'unknown file system'}): a file was durable in {seconds * 1e3:.0f} ms"
    if kind in _IN_MEMORY:
        return warning(_TOPIC, f"{folder} is in memory ({kind}): lost when the machine is", "choose a disk")
    if free < _LEAST_BYTES:
        return warning(
            _TOPIC, f"{text}; only {free / 2**30:.2f} GiB free", "make room, or choose another disk"
        )
    if seconds > _SLOW_SECONDS:
        return warning(
            _TOPIC, f"{text}, which is slow", "training does not wait for it; a faster disk loses fewer steps"
        )
    return ok(_TOPIC, f"{text}; {free / 2**30:.0f} GiB free")


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that a folder is on; empty where it is not known."""
    best, kind = "", ""
    real = os.path.realpath(folder)
    for line in read_text(mounts).splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def _look_at_url(url: str) -> DoctorFinding:
    begun = time.monotonic()
    name = f"paceline-doctor-{os.getpid()}"
    try:
        storage = open_storage(url)
        storage.put(name, _SAMPLE)
        same = storage.read(name) == _SAMPLE
        storage.remove(name)
    except PacelineError as error:
        return wrong(_TOPIC, error.message, error.remedy)
    if not same:
        return wrong(_TOPIC, f"{url} gives back other bytes than were written", "choose another store")
    return ok(_TOPIC, f"{url}: written, read back and deleted in {(time.monotonic() - begun) * 1e3:.0f} ms")


def _missing_parents(folder: Path) -> list[Path]:
    """Return the folders that do not exist yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]
