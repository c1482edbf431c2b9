"""`paceline audit`: what a run's journal proves, as a page for people or as JSON.

Must not import torch, nor judge: that is train/audit.py's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.core.foreign import shown

if TYPE_CHECKING:
    from paceline.train.audit import Audit, Epoch
    from paceline.train.run_folder import RunFolder

# Of findings that go on for pages the first ones say it all; JSON has every one.
_SHOWN = 40


def audit(
    run: Annotated[str, typer.Argument(help="A run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Prove that each step was committed once and each sample applied once; exit code 1 where it is not so.

    Reads the journal, with the workers' receipts in it. docs/staying-alive.md says what confirms what. It
    counts steps and samples and compares hashes where they were taken; that the numbers are right is proved
    by `paceline verify`, which computes them again.

    Example: paceline audit runs/20250301-120000-train
    """
    from paceline.core import journal
    from paceline.train.audit import audit as look
    from paceline.train.run_folder import RunFolder

    folder = RunFolder.open(run)
    damage: list[journal.Damage] = []
    lines = journal.iterate(folder.journal_file, on_damage=damage.append)
    found = look(lines, backup=_with_backup(folder))
    if damage:
        notes = (f"{_count(len(damage), 'damaged line')} of the journal could not be read", *found.notes)
        found = dataclasses.replace(found, notes=notes)
    if as_json:
        _print_json(found)
    else:
        _print(folder.path.name, found)
    if not found.proved:
        raise typer.Exit(1)


def _with_backup(folder: RunFolder) -> bool:
    settings = folder.recorded().get("fault_tolerance")
    return isinstance(settings, dict) and settings.get("stragglers") == "backup"


def _print_json(found: Audit) -> None:
    import json

    plain = dataclasses.asdict(found)
    _echo(json.dumps({"proved": found.proved, **plain}, indent=2, allow_nan=False))


def _print(name: str, found: Audit) -> None:
    for title, text in _lines(found):
        _echo(f"  {title:<9} {text}")
    for note in found.notes:
        _echo(f"  note      {note}")
    for finding in found.wrong[:_SHOWN]:
        _echo(f"  wrong     {finding}")
    if len(found.wrong) > _SHOWN:
        _echo(f"  wrong     and {len(found.wrong) - _SHOWN} more: --json has all of them")
    if found.proved:
        _echo(f"{name}: each step was committed once, each sample applied once")
    else:
        _echo(f"{name}: not proved, {_count(len(found.wrong), 'thing')} wrong")


def _lines(found: Audit) -> list[tuple[str, str]]:
    again = f"; {found.redone:,} were lost and done again" if found.redone else ""
    resumes = f" after {_count(found.restarts, 'restart')}" if found.redone else ""
    lines = [("steps", f"{found.steps:,}, each once{again}{resumes}")]
    if found.wrong:
        lines = [("steps", f"{found.steps:,}{again}{resumes}")]
    skipped = f", {found.skipped:,} skipped as unreadable" if found.skipped else ""
    size = "" if found.size is None else f" of a data set of {found.size:,}"
    lines += [
        ("epochs", _epochs(found.epochs, found.size)),
        ("samples", f"{found.samples:,} applied{size}{skipped}"),
        ("order", found.order + ("; looked at one by one" if found.enumerated else "")),
    ]
    for epoch in found.epochs:
        if epoch.skipped:
            lines.append(("skipped", f"epoch {epoch.epoch}: samples {', '.join(map(str, epoch.skipped))}"))
    if found.views:
        seconds = sorted(found.repair_seconds)
        took = ""
        if seconds:
            took = f" ({seconds[len(seconds) // 2]:.3f} s in the median, {seconds[-1]:.3f} s at most)"
        lines += [
            (
                "views",
                f"{_count(found.views, 'view')}, {_count(found.lost_workers, 'lost worker')}, "
                f"{_count(found.repairs, 'repair')}{took}",
            ),
            (
                "receipts",
                f"{_count(found.receipts.count, 'receipt')} for {found.receipts.steps:,} steps: "
                f"{found.receipts.by_receipt:,} shard results confirmed by receipt, "
                f"{found.receipts.by_commit:,} by commit",
            ),
        ]
    if found.hashes or found.shard_hashes:
        lines.append(("hashes", f"{len(found.hashes):,} audited steps, {found.shard_hashes:,} shards"))
    if found.samples_agreed:
        lines.append(
            ("agreement", f"in {found.samples_agreed:,} steps the ranks held the same sampled weights")
        )
    lines.append(("numbers", "not proved here: `paceline verify` computes steps again and compares them"))
    if found.final_hash is not None:
        lines.append(("final", f"{found.final_hash} ({found.ended})"))
    return lines


def _epochs(epochs: tuple[Epoch, ...], size: int | None) -> str:
    if not epochs:
        return "none"
    done = [epoch for epoch in epochs if size is not None and _taken(epoch) == size]
    rest = [epoch for epoch in epochs if epoch not in done]
    told = [f"{len(done)} complete"] if done else []
    told += [f"epoch {epoch.epoch} to position {_taken(epoch):,}" for epoch in rest[:8]]
    return ", ".join(told + (["..."] if len(rest) > 8 else []))


def _taken(epoch: Epoch) -> int:
    return epoch.applied + len(epoch.skipped) if epoch.covered is None else epoch.covered


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _echo(text: str) -> None:
    """The run's folder may come from elsewhere."""
    typer.echo(shown(text))
