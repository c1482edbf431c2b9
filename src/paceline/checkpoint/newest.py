"""Which checkpoint a run goes on from: the newest that is whole, and never a guess.

A damaged version is passed over: an older one is the best there is. One that cannot be read here
(permissions, a disk, a server) or whose format is not known is no such version: it may be well, so that going
back behind it, or to the beginning, is refused. Must not know what the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from paceline.checkpoint.manifest import Damage, DamagedCheckpointError, UnreadableCheckpointError
from paceline.checkpoint.reading import Checkpoint, examine, read_manifest
from paceline.checkpoint.storage import Storage


def newest_good(
    storage: Storage,
    versions: Callable[[], list[int]],
    tell: Callable[[Iterable[Damage]], None],
    at_most_step: int | None = None,
) -> Checkpoint | None:
    """The newest of the committed `versions` that verifies; None where none (of at most that step) is."""
    bad: dict[int, tuple[Damage, ...]] = {}
    late: set[int] = set()
    while True:
        before = versions()
        candidates = [version for version in reversed(before) if version not in bad and version not in late]
        for version in candidates:
            if at_most_step is not None and _is_later(storage, version, at_most_step):
                late.add(version)
                continue
            examined = examine(storage, version, keep=True)
            if examined.checkpoint is not None:
                tell(examined.damage)
                return examined.checkpoint
            if examined.gone:
                continue
            bad[version] = examined.damage
            if any(item.kind != "damaged" for item in examined.damage):
                raise _unreadable(storage, bad, [other for other in candidates if other < version])
            tell(examined.damage)
        # One that was deleted while it was looked at has made room for a newer one: look again.
        if not candidates and versions() == before:
            break
    if bad:
        many = f"each of the {len(bad)} checkpoints" if len(bad) > 1 else "the only checkpoint"
        raise DamagedCheckpointError(
            f"{many} in {storage.url} is damaged:",
            damage=_listed(bad),
            remedy="bring a version back from a copy, or begin a new run in another folder",
        )
    return None


def _is_later(storage: Storage, version: int, step: int) -> bool:
    manifest = read_manifest(storage, version)[0]
    return manifest is not None and manifest.info.step > step


def _listed(bad: Mapping[int, tuple[Damage, ...]]) -> tuple[Damage, ...]:
    return tuple(item for items in bad.values() for item in items)


def _unreadable(
    storage: Storage, bad: Mapping[int, tuple[Damage, ...]], older: Iterable[int]
) -> UnreadableCheckpointError:
    """The error about the last of `bad`, with what the manifests of those before it say."""
    found, readable = list(_listed(bad)), []
    for version in older:
        manifest, damage = read_manifest(storage, version)
        found += damage
        if manifest is not None:
            readable.append(f"resume={version} of step {manifest.info.step}")
    back = f"; or name an older version to go back to: {', '.join(readable)}" if readable else ""
    return UnreadableCheckpointError(
        f"checkpoint {min(bad)} in {storage.url} cannot be read here, and nothing says that it is damaged:",
        damage=tuple(found),
        remedy=UnreadableCheckpointError.usual_remedy + back,
    )
