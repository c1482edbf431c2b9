"""The checkpoints of a run: written in parts, committed at once, found by name, verified when opened.

    v00000012/part-00-of-04.safetensors ... state.json   written first, each durable when its record exists
    v00000012/manifest.json                              the commit: appears whole, after all it names
    latest                                               moves after that, and only forward
    tags.json                                            name -> version

Deleting goes the other way round, manifest first, so that at no moment a manifest names a file that is not
there.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, final

from paceline.checkpoint.checksummed_json import checksum, decode_document, encode_document
from paceline.checkpoint.loader import (
    Checkpoint,
    examine,
    has_manifest,
    newest_good,
    read_document,
    read_manifest,
)
from paceline.checkpoint.manifest import (
    MANIFEST,
    OWNER,
    STATE,
    CheckpointDamage,
    CheckpointInfo,
    CheckpointManifest,
    DamagedCheckpointError,
    FileRecord,
    UnreadableCheckpointError,
    check_complete,
    check_info,
    folder_name,
    part_name,
    version_of,
)
from paceline.checkpoint.retention import Retention, kept, ranked
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PlatformError, UsageError
from paceline.core.storage.open_storage import open_storage
from paceline.core.storage.storage import Storage
from paceline.core.wording import with_article

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.checkpoint.compare import CheckpointDiff
    from paceline.checkpoint.export import Format

_log = logging.getLogger(__name__)

LATEST: Final = "latest"
TAGS: Final = "tags.json"

_TAG: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_RESERVED: Final = re.compile(r"latest|best|v\d+")
_NAMES: Final = "give a version, a tag, 'latest' or 'best'"

OnDamage = Callable[[CheckpointDamage], None]


@final
class CheckpointStore:
    """Checkpoints below a path or an fsspec URL. One run at a time saves; any number of processes read."""

    def __init__(self, where: str | os.PathLike[str] | Storage, *, clock: Clock | None = None) -> None:
        self.storage = where if isinstance(where, Storage) else open_storage(where)
        self._clock = clock or WallClock()
        self._highest: int | None = None
        self._token = secrets.token_hex(8)  # of this writer, among those that save to one place

    @property
    def url(self) -> str:
        return self.storage.url

    # -- saving

    def next_version(self, run: str = "") -> int:
        """Reserve a version that was never used here: higher than any, also than those deleted since."""
        if self._highest is None:
            # Looked up once: the caller waits for this, and a store far away takes its time to list.
            newest = self._latest()
            self._highest = max(
                [0, *self._versions(), *self.tags().values(), *(newest[:1] if newest else ())]
            )
        version = self._highest + 1
        while not self._reserved(version, run):
            version += 1
        self._highest = version
        return version

    def _reserved(self, version: int, run: str) -> bool:
        folder = folder_name(version)
        if self.storage.exclusive:
            return self.storage.make_folder(folder)
        # Where making a folder is not exclusive (object stores): a version with files in it is taken. Of two
        # runs that take one at the same moment, the owner file of the later one stays, and the other run is
        # refused when it commits.
        if self.storage.names(folder):
            return False
        self.storage.make_folder(folder)
        self.storage.put(f"{folder}/{OWNER}", encode_document({"run": run, "writer": self._token}))
        return True

    def _check_owner(self, version: int) -> None:
        owner = self._document(f"{folder_name(version)}/{OWNER}")[0]
        if owner is not None and owner.get("writer") != self._token:
            raise PlatformError(
                f"checkpoint {version} cannot be committed: another run saves to {self.url} at the same time "
                "and has taken this version",
                remedy="give every run a place of its own for its checkpoints (checkpoint.url)",
            )

    def write_image(self, version: int, part: int, parts: int, image: memoryview, tensors: int) -> FileRecord:
        """Write a part whose file is already laid out in memory."""
        if not 0 <= part < parts:
            raise UsageError(f"part {part} of {parts}", remedy="give 0 <= part < parts")
        record = FileRecord(part_name(part, parts), len(image), checksum(image), tensors)
        self.storage.write(f"{folder_name(version)}/{record.name}", image)
        return record

    def write_state_bytes(self, version: int, data: bytes) -> FileRecord:
        record = FileRecord(STATE, len(data), checksum(data))
        self.storage.write(f"{folder_name(version)}/{STATE}", memoryview(data))
        return record

    def commit(self, version: int, files: Iterable[FileRecord], info: CheckpointInfo) -> CheckpointManifest:
        """Make a version whose files are all written the newest checkpoint; before this it does not exist."""
        records = tuple(sorted(files, key=lambda file: file.name))
        check_complete(version, records)
        check_info(info)
        folder = folder_name(version)
        if not self.storage.exclusive:
            self._check_owner(version)
        for record in records:
            try:
                size = self.storage.size(f"{folder}/{record.name}")
                found = "is not there" if size is None else f"has {size} bytes instead of {record.nbytes}"
            except OSError as error:
                size, found = None, f"cannot be looked at: {error.strerror or error}"
            if size != record.nbytes:
                raise PlatformError(
                    f"checkpoint {version} cannot be committed: {record.name} {found} in {self.url}",
                    remedy="give a checkpoint folder that every host of the job shares",
                )
        manifest = CheckpointManifest(version, self._clock.now(), info, records)
        data = manifest.to_bytes()
        self.storage.put(f"{folder}/{MANIFEST}", data)
        newest = self._latest()
        if newest is None or newest[0] < version:
            self.storage.put(LATEST, encode_document({"version": version, "manifest": checksum(data)}))
        return manifest

    def discard(self, version: int) -> None:
        """Delete all of a version: one that failed to be saved, or one that is not needed."""
        folder = folder_name(version)
        self.storage.remove(f"{folder}/{MANIFEST}", durable=True)
        for name in self.storage.names(folder):
            self.storage.remove(f"{folder}/{name}")
        self.storage.remove_folder(folder)

    # -- finding

    def manifests(self, on_damage: OnDamage | None = None) -> list[CheckpointManifest]:
        """Return every committed checkpoint whose manifest is whole, oldest first; reads no other file."""
        found = []
        for version in self._versions():
            manifest, damage = read_manifest(self.storage, version)
            self._tell(damage, on_damage)
            if manifest is not None:
                found.append(manifest)
        return found

    def versions(self) -> list[int]:
        """Return every committed version, oldest first, also those whose manifest cannot be read."""
        while True:
            present = self._versions()
            # One is deleted only after a newer one's commit: where all that were listed are gone, the newer
            # one is in another listing.
            if (committed := self._committed(present)) or self._versions() == present:
                return committed

    def find(self, which: int | str, *, metric: str = "loss", mode: Literal["min", "max"] = "min") -> int:
        """Return the version that a number, a tag, "latest" or "best" stands for."""
        if isinstance(which, int):
            return which
        if not isinstance(which, str):
            raise UsageError(f"a version is asked for as {with_article(which)}", remedy=_NAMES)
        if which == "latest":
            return self._newest()
        if which == "best":
            return self._best(metric, mode)
        tagged = self.tags().get(which)
        if tagged is not None:
            return tagged
        if re.fullmatch(r"v?\d+", which):
            return int(which.removeprefix("v"))
        names = ", ".join(sorted(self.tags())) or "none"
        raise UsageError(
            f"there is no checkpoint {which!r} in {self.url} (tags: {names})",
            remedy=_NAMES,
        )

    def open(
        self, which: int | str = "latest", *, metric: str = "loss", mode: Literal["min", "max"] = "min"
    ) -> Checkpoint:
        """Return a checkpoint, all of it verified and in memory; DamagedCheckpointError has the reason."""
        version = self.find(which, metric=metric, mode=mode)
        examined = examine(self.storage, version, keep=True)
        # What a name stands for may be deleted at this moment; then the name stands for another one.
        while examined.gone and version != (again := self.find(which, metric=metric, mode=mode)):
            version = again
            examined = examine(self.storage, version, keep=True)
        if examined.gone:
            have = [manifest.version for manifest in self.manifests()]
            raise UsageError(
                f"there is no checkpoint {version} in {self.url}",
                remedy=f"there are {have}" if have else "there is none at all",
            )
        if examined.checkpoint is None:
            if any(item.kind != "damaged" for item in examined.damage):
                raise UnreadableCheckpointError(
                    f"checkpoint {version} in {self.url} cannot be read here:", damage=examined.damage
                )
            raise DamagedCheckpointError(
                f"checkpoint {version} in {self.url} is damaged:", damage=examined.damage
            )
        self._tell(examined.damage, None)
        return examined.checkpoint

    def newest_good(
        self, on_damage: OnDamage | None = None, *, at_most_step: int | None = None
    ) -> Checkpoint | None:
        """Return the newest checkpoint that verifies; each damaged one on the way is reported, by default to
        the log.

        None where there is no checkpoint (of at most that step). Where there are some and none is whole, or
        where one cannot be read that may be newer and whole, that is an error with the list.
        """
        return newest_good(
            self.storage, self.versions, lambda damage: self._tell(damage, on_damage), at_most_step
        )

    def verify(self, which: int | str | None = None) -> list[CheckpointDamage]:
        """Return what is wrong with a checkpoint, or with all of them and the files beside them."""
        if which is not None:
            version = self.find(which)
            examined = examine(self.storage, version, keep=False)
            if examined.gone:
                return [CheckpointDamage(version, f"{folder_name(version)}/{MANIFEST}", "is missing")]
            return list(examined.damage)
        found = [damage for name in (LATEST, TAGS) for damage in self._document(name)[1]]
        for version in self._versions():
            found += examine(self.storage, version, keep=False).damage
        newest = self._latest()
        if newest is not None and not any(item.version == newest[0] or item.file == LATEST for item in found):
            found += self._check_latest(*newest)
        return found

    def diff(self, before: int | str, after: int | str) -> CheckpointDiff:
        """Return what changed from one checkpoint to another."""
        from paceline.checkpoint.compare import compare

        return compare(self.open(before), self.open(after))

    def export(
        self,
        which: int | str,
        path: str | os.PathLike[str],
        *,
        format: Format = "safetensors",
        everything: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Write the model's tensors, or `everything`, as one plain file for other programs."""
        from paceline.checkpoint.export import export

        return export(self.open(which), path, format, everything, overwrite)

    # -- tags and deleting

    def tags(self) -> dict[str, int]:
        """Return every tag and its version; empty, with a line in the log, when the file is damaged."""
        body, damage = self._document(TAGS)
        self._tell(damage, None)
        return dict((body or {}).get("tags", {}))

    def tag(self, which: int | str, name: str) -> int:
        """Give a version a name, or move a name; tagged checkpoints are never deleted by `prune`."""
        if not _TAG.fullmatch(name) or _RESERVED.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be a tag",
                remedy="use a letter, then letters, digits and '._-'; not 'latest', 'best' or a version",
            )
        version = self.find(which)
        self._require(version)
        with self.storage.lock():
            self._require(version)
            self._write_tags({**self._tags_or_fail(), name: version})
        return version

    def untag(self, name: str) -> None:
        """Take a name away; the checkpoint stays until retention deletes it."""
        if name not in self.tags():
            raise UsageError(
                f"there is no tag {name!r} in {self.url}", remedy=f"there are {sorted(self.tags())}"
            )
        with self.storage.lock():
            tags = self._tags_or_fail()
            self._write_tags({tag: version for tag, version in tags.items() if tag != name})

    def prune(self, retention: Retention, *, run: str | None = None) -> list[int]:
        """Delete versions that need not stay, and return them; delete also what unfinished saves left behind.

        With `run` only versions of that run are counted and deleted.
        """
        if not self._versions():
            return []
        with self.storage.lock():
            body, damage = self._document(TAGS)
            if damage:
                # It is not known which ones are tagged: nothing is deleted.
                self._tell(damage, None)
                return []
            manifests = [manifest for manifest in self.manifests() if run is None or manifest.info.run == run]
            newest = self._latest()
            protected = {*(body or {}).get("tags", {}).values(), *([] if newest is None else [newest[0]])}
            stay = kept(manifests, retention, protected)
            committed = {manifest.version for manifest in manifests}
            removed = sorted(committed - stay)
            for version in removed:
                self.discard(version)
            # A save that is under way has a higher version than any that is committed.
            folders = [version for version in self._versions() if version < max(committed, default=0)]
            for version in sorted(set(folders) - set(self._committed(folders))):
                if self._may_clear(version, run):
                    self.discard(version)
        return removed

    def _may_clear(self, version: int, run: str | None) -> bool:
        """Return whether an unfinished version is this writer's, or of a run that does not write."""
        if run is None or self.storage.exclusive:
            return True
        owner = self._document(f"{folder_name(version)}/{OWNER}")[0]
        return owner is None or owner.get("run") == run

    # -- inside

    def _versions(self) -> list[int]:
        """Return the versions that have a folder, oldest first."""
        return sorted(v for v in map(version_of, self.storage.names("")) if v is not None)

    def _committed(self, versions: Iterable[int]) -> list[int]:
        """Return those that have a manifest, oldest first: one is deleted only after a newer one's commit."""
        return [version for version in sorted(versions) if has_manifest(self.storage, version)]

    def _require(self, version: int) -> None:
        if not self._committed([version]):
            raise UsageError(
                f"there is no checkpoint {version} in {self.url}", remedy="see `paceline checkpoint ls`"
            )

    def _best(self, metric: str, mode: Literal["min", "max"]) -> int:
        manifests = self.manifests()
        best = ranked(manifests, Retention(metric=metric, mode=mode))
        if best:
            return best[0].version
        if not manifests:
            return self._newest()  # opening one that cannot be read fails with the reason
        have = sorted({name for manifest in manifests for name in manifest.info.metrics})
        raise UsageError(
            f"no checkpoint in {self.url} has the metric {metric!r}",
            remedy=f"name another metric: there are {have}" if have else "name a version or a tag",
        )

    def _newest(self) -> int:
        newest = self._latest()
        while newest is not None:
            if has_manifest(self.storage, newest[0]):
                return newest[0]
            # It is deleted only after LATEST names a newer one. A listing may show one that LATEST does not
            # name yet: "latest" would go back to an older one at the next call.
            if (again := self._latest()) == newest:
                break
            newest = again
        present = [manifest.version for manifest in self.manifests()] or self.versions()
        if present:
            return present[-1]  # opening one that cannot be read fails with the reason
        raise UsageError(f"there is no checkpoint in {self.url}", remedy="check the path or the URL")

    def _latest(self) -> tuple[int, str] | None:
        body, damage = self._document(LATEST)
        self._tell(damage, None)
        return None if body is None else (int(body["version"]), str(body["manifest"]))

    def _check_latest(self, version: int, digest: str) -> list[CheckpointDamage]:
        path = f"{folder_name(version)}/{MANIFEST}"
        if not has_manifest(self.storage, version):
            return [CheckpointDamage(version, LATEST, f"points to version {version}, which is not there")]
        if checksum(self.storage.read(path)) != digest:
            problem = f"was written for another {path} than the one that is there"
            return [CheckpointDamage(version, LATEST, problem)]
        return []

    def _document(self, name: str) -> tuple[dict[str, Any] | None, tuple[CheckpointDamage, ...]]:
        return read_document(self.storage, name, decode_document)

    def _tags_or_fail(self) -> dict[str, int]:
        body, damage = self._document(TAGS)
        if damage:
            raise DamagedCheckpointError(
                f"the tags of {self.url} cannot be changed:",
                damage=damage,
                remedy=f"delete {TAGS} and tag again what must stay",
            )
        return dict((body or {}).get("tags", {}))

    def _write_tags(self, tags: dict[str, int]) -> None:
        self.storage.put(TAGS, encode_document({"tags": dict(sorted(tags.items()))}))

    def _tell(self, damage: Iterable[CheckpointDamage], on_damage: OnDamage | None) -> None:
        for item in damage:
            if on_damage is None:
                _log.warning("checkpoints in %s: %s", self.url, item)
            else:
                on_damage(item)
