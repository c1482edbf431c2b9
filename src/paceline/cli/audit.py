"""`paceline audit`: what a run's journal proves, as a page for people or as JSON. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from paceline.cli.output import AsJson, OptionalRun, echo, echo_json
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.core.journal import JournalDamage
    from paceline.monitor.audit import AuditResult, EpochCoverage
    from paceline.train.state.run_folder import RunFolder

_SHOWN = 40  # findings at most; JSON has every one


def audit(run: OptionalRun = None, as_json: AsJson = False) -> None:
    """Prove that each step was committed once and each sample applied once; exit code 1 where it is not so.

    Reads the journal, with the workers' receipts in it. docs/staying-alive.md says what confirms what. It
    counts steps and samples and compares hashes where they were taken; that the numbers are right is proved
    by `paceline verify`, which computes them again.

    Example: paceline audit runs/20250301-120000-train
    """
    from paceline.cli.run_choice import opened

    folder = opened(run)
    found, damage = audited(folder)
    if damage:
        notes = (f"{counted(len(damage), 'damaged line')} of the journal could not be read", *found.notes)
        found = dataclasses.replace(found, notes=notes)
    if as_json:
        echo_json({"proved": found.proved, **dataclasses.asdict(found)})
    else:
        _print(folder.path.name, found)
    if not found.proved:
        raise typer.Exit(1)


def audited(folder: RunFolder) -> tuple[AuditResult, list[JournalDamage]]:
    """Audit the journal of a run; return the lines that could not be read, too."""
    from paceline.core import journal
    from paceline.monitor.audit import audit as look

    damage: list[JournalDamage] = []
    lines = journal.iterate(folder.journal_file, on_damage=damage.append)
    settings = folder.recorded().get("fault_tolerance")
    backup = isinstance(settings, dict) and settings.get("stragglers") == "backup"
    return look(lines, backup=backup), damage


def _print(name: str, found: AuditResult) -> None:
    for title, text in summary_lines(found):
        echo(f"  {title:<9} {text}")
    for note in found.notes:
        echo(f"  note      {note}")
    for finding in found.wrong[:_SHOWN]:
        echo(f"  wrong     {finding}")
    if len(found.wrong) > _SHOWN:
        echo(f"  wrong     and {len(found.wrong) - _SHOWN} more: --json has all of them")
    if found.proved:
        what = "draw" if found.drawn else "sample"
        echo(f"{name}: each step was committed once, each {what} applied once")
    else:
        echo(f"{name}: not proved, {counted(len(found.wrong), 'thing')} wrong")


def summary_lines(found: AuditResult) -> list[tuple[str, str]]:
    were = "was" if found.redone == 1 else "were"
    again = f"; {found.redone:,} {were} lost and done again" if found.redone else ""
    resumes = f" after {counted(found.restarts, 'restart')}" if found.redone else ""
    once = "" if found.wrong else ", each once"
    lines = [("steps", f"{found.steps:,}{once}{again}{resumes}")]
    skipped = f", {found.skipped:,} skipped as unreadable" if found.skipped else ""
    size = "" if found.size is None else f" of a data set of {found.size:,}"
    if found.drawn:
        size = f" in epochs of {found.size:,} draws: a sample counts as often as it was drawn"
    lines += [
        ("epochs", _epochs(found.epochs, found.size)),
        ("samples", f"{found.samples:,} applied{size}{skipped}"),
        ("order", found.order + ("; looked at one by one" if found.enumerated else "")),
    ]
    for epoch in found.epochs:
        if epoch.skipped:
            lines.append(("skipped", f"epoch {epoch.epoch}: samples {', '.join(map(str, epoch.skipped))}"))
    if found.views:
        took = ""
        if seconds := sorted(found.repair_seconds):
            took = f" ({seconds[len(seconds) // 2]:.3f} s in the median, {seconds[-1]:.3f} s at most)"
        lines += [
            (
                "views",
                f"{counted(found.views, 'view')}, {counted(found.lost_workers, 'lost worker')}, "
                f"{counted(found.repairs, 'repair')}{took}",
            ),
            (
                "receipts",
                f"{counted(found.receipts.count, 'receipt')} for {counted(found.receipts.steps, 'step')}: "
                f"{counted(found.receipts.by_receipt, 'shard result')} confirmed by receipt, "
                f"{found.receipts.by_commit:,} by commit",
            ),
        ]
    if found.hashes or found.shard_hashes:
        audited, shards = counted(len(found.hashes), "audited step"), counted(found.shard_hashes, "shard")
        lines.append(("hashes", f"{audited}, {shards}"))
    if found.samples_agreed:
        steps = counted(found.samples_agreed, "step")
        lines.append(("agreement", f"in {steps} the ranks held the same sampled weights"))
    lines.append(("numbers", "not proved here: `paceline verify` computes steps again and compares them"))
    if found.final_hash is not None:
        lines.append(("final", f"{found.final_hash} ({found.ended})"))
    return lines


def _epochs(epochs: tuple[EpochCoverage, ...], size: int | None) -> str:
    if not epochs:
        return "none"
    done = [epoch for epoch in epochs if size is not None and _taken(epoch) == size]
    rest = [epoch for epoch in epochs if epoch not in done]
    parts = [f"{len(done)} complete"] if done else []
    parts += [f"epoch {epoch.epoch} to position {_taken(epoch):,}" for epoch in rest[:8]]
    return ", ".join(parts + (["..."] if len(rest) > 8 else []))


def _taken(epoch: EpochCoverage) -> int:
    return epoch.applied + len(epoch.skipped) if epoch.covered is None else epoch.covered
