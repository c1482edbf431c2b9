"""What a run promises, as checks with an outcome each: for reports that programs read. Pure.

came_to_its_end        passed: it finished; skipped: it was stopped or still runs; failed: it failed
journal_is_whole       every line of the journal can be read
steps_committed_once   each step counts once
each_sample_once       each sample of an epoch was applied once
each_shard_once        each shard of a step was computed once, by the workers' receipts
replicas_agree         ranks held the same bits, and what was done again has the bits that it had
checkpoint_verifies    one for each version: every byte is as it was written
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from paceline.core.wording import counted
from paceline.monitor.audit import AuditResult

CheckOutcome = Literal["passed", "failed", "skipped"]


@final
@dataclass(frozen=True)
class RunCheck:
    """One promise of one run. `text` says what was found, `seconds` how long looking took."""

    run: str
    name: str
    outcome: CheckOutcome
    text: str = ""
    seconds: float = 0.0

    @property
    def nodeid(self) -> str:
        return f"{self.run}::{self.name}"


def journal_checks(
    run: str, found: AuditResult, damage: Sequence[str], *, failure: str, running: bool, seconds: float = 0.0
) -> list[RunCheck]:
    """Return the checks that the journal decides. `failure`: why the run failed; empty where it did not.
    `seconds`: what the audit took, all of which is the first check's."""

    def check(name: str, wrong: Sequence[str], good: str, looked_at: bool = True) -> RunCheck:
        if wrong:
            return RunCheck(run, name, "failed", "\n".join(wrong))
        return RunCheck(run, name, "passed" if looked_at else "skipped", good)

    wrong = found.wrong_by_check
    compared = found.samples_agreed + len(found.hashes) + found.shard_hashes
    return [
        _end_check(run, found, failure, running, seconds),
        check("journal_is_whole", damage, "every line can be read"),
        check("steps_committed_once", wrong["steps"], counted(found.steps, "step"), found.steps > 0),
        check("each_sample_once", wrong["samples"], counted(found.samples, "sample"), found.samples > 0),
        check(
            "each_shard_once",
            wrong["shards"],
            f"{counted(found.receipts.count, 'receipt')} of workers"
            if found.receipts.count
            else "no receipts: the run had no supervisor",
            found.receipts.count > 0,
        ),
        check(
            "replicas_agree",
            wrong["bits"],
            f"{counted(compared, 'comparison')} of hashes" if compared else "nothing was compared",
            compared > 0 or found.redone > 0,
        ),
    ]


def checkpoint_checks(run: str, damage: Mapping[int, tuple[Sequence[str], float]]) -> list[RunCheck]:
    """Return a check per version: what is wrong with it, and the seconds that reading it took."""
    if not damage:
        return [RunCheck(run, "checkpoint_verifies", "skipped", "there is no checkpoint")]
    return [
        RunCheck(
            run,
            f"checkpoint_verifies[{version}]",
            "failed" if wrong else "passed",
            "\n".join(wrong) or "every byte is as it was written",
            seconds,
        )
        for version, (wrong, seconds) in sorted(damage.items())
    ]


def _end_check(run: str, found: AuditResult, failure: str, running: bool, seconds: float) -> RunCheck:
    name = "came_to_its_end"
    if failure:
        return RunCheck(run, name, "failed", failure, seconds)
    if found.ended == "finished":
        return RunCheck(run, name, "passed", f"after {counted(found.steps, 'step')}", seconds)
    if found.ended is not None:
        return RunCheck(run, name, "skipped", f"it was stopped: {found.ended}", seconds)
    if running:
        return RunCheck(run, name, "skipped", "it still runs", seconds)
    return RunCheck(run, name, "failed", "the journal has no end: the run was killed", seconds)
