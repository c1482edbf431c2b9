"""Kill -9 of any of a run's processes, alone or together, and start it again, in many sequences: how many of
them end with the hash of the undisturbed run and a journal that `paceline audit` proves.

In each start of a sequence up to two kills leave the process that called `fit` alone; the last one does not.
The next start comes at once, while what is left of the one before may still train or save. The last start is
left in peace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.recovery import command
from bench.recovery.processes import Family
from bench.recovery.supervised_run import NO_BACKOFF, RunSettings
from bench.report import Report, Target
from paceline.control import supervisor_address
from paceline.core import events, journal
from paceline.core.errors import PacelineError

SEQUENCES = 30
QUICK_SEQUENCES = 4
DISTURBED_STARTS = 3
SEED = 3
STEPS = 400
WORKERS = (1, 2, 3)
START_SECONDS = 120.0
# How much the journal grows before the next kill: a few lines, or a good part of the run.
GROWTH_BYTES = (100, 12_000)
LONGEST_WAIT = 0.05

WITHOUT_CALLER = ("supervisor", "one worker", "workers", "supervisor and workers")
WITH_CALLER = ("caller", "caller and supervisor", "caller and workers", "all")


@dataclass
class Sequence:
    """What was killed, at which step, and what came of it in the end."""

    kills: list[tuple[str, int]] = field(default_factory=list)
    hash: str | None = None
    wrong: tuple[str, ...] = ()
    recalled: int = 0  # steps that were written from a checkpoint
    seconds: float = 0.0  # of the last start


def disturb(folder: Path, dice: random.Random) -> Sequence:
    """One sequence."""
    done = Sequence()
    settings = RunSettings(
        str(folder / "run"), STEPS, shards=4, tiny=True, checkpoint_every=10, backoff=NO_BACKOFF
    )
    with Family(folder / "log") as family:
        for start in range(DISTURBED_STARTS + 1):
            again = dataclasses.replace(settings, workers=dice.choice(WORKERS), resume=start > 0)
            caller = family.start(again.command())
            if start < DISTURBED_STARTS:
                _disturb(again, family, start, caller, dice, done)
            begun = time.monotonic()
            family.wait(start, START_SECONDS)
            done.seconds = time.monotonic() - begun
    done.hash, done.wrong = settings.final_hash(), settings.unproved()
    done.recalled = sum(
        isinstance(event, events.StepCommitted) and event.generation == events.RECALLED
        for event in journal.iterate(settings.journal)
    )
    return done


def _disturb(
    settings: RunSettings, family: Family, start: int, caller: int, dice: random.Random, done: Sequence
) -> None:
    kills = [*dice.choices(WITHOUT_CALLER, k=dice.randrange(3)), dice.choice(WITH_CALLER)]
    for who in kills:
        wanted = _size(settings.journal) + dice.randrange(*GROWTH_BYTES)
        deadline = time.monotonic() + START_SECONDS
        while _size(settings.journal) < wanted and family.status()[start] is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        time.sleep(dice.uniform(0.0, LONGEST_WAIT))
        family.descendants()  # so that orphans end with the benchmark
        if family.status()[start] is not None:
            return  # the run came to its end before
        step, workers = _look(settings)
        done.kills.append((who, step))
        for pid in _chosen(who, caller, _supervisor(settings), workers, dice):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _chosen(
    who: str, caller: int, supervisor: list[int], workers: list[int], dice: random.Random
) -> list[int]:
    parts = {
        "caller": [caller],
        "supervisor": supervisor,
        "workers": workers,
        "one worker": [dice.choice(workers)] if workers else [],
        "all": [caller, *supervisor, *workers],
    }
    return [pid for part in who.split(" and ") for pid in parts[part]]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _supervisor(settings: RunSettings) -> list[int]:
    try:
        return [supervisor_address.read(Path(settings.run_dir)).pid]
    except PacelineError:
        return []


def _look(settings: RunSettings) -> tuple[int, list[int]]:
    """The newest step, and the workers of the newest start."""
    step, workers = 0, dict[int, int]()
    for event in journal.iterate(settings.journal):
        match event:
            case events.SupervisorStarted(attempt=1):
                workers.clear()
            case events.WorkerStarted():
                workers[event.rank] = event.pid
            case events.StepCommitted():
                step = event.step
    return step, list(workers.values())


def run(quick: bool = False, sequences: int = 0, seed: int = SEED) -> Report:
    """Sequences of kill -9 and start again: right hashes, proved journals."""
    wanted = sequences or (QUICK_SEQUENCES if quick else SEQUENCES)
    found: list[Sequence] = []
    with tempfile.TemporaryDirectory(prefix="paceline-starts-") as root:
        calm = RunSettings(str(Path(root, "calm")), STEPS, workers=1, shards=4, tiny=True)
        with Family(Path(root, "calm.log")) as family:
            family.start(calm.command())
            family.finish(START_SECONDS)
        expected = calm.final_hash()
        for number in range(wanted):
            folder = Path(root, str(number))
            folder.mkdir()
            found.append(disturb(folder, random.Random(f"{seed}-{number}")))
            last = found[-1]
            state = "right" if last.hash == expected and not last.wrong else "WRONG"
            print(f"{number + 1}: {state}, {last.kills}", file=sys.stderr, flush=True)
    return _report(found, expected)


def _report(found: list[Sequence], expected: str | None) -> Report:
    report = Report(
        "recovery_starts",
        f"{len(found)} sequences of {DISTURBED_STARTS} starts that are killed and one that is not",
        ("killed at once", "times", "at steps"),
        data={"kills": [one.kills for one in found], "seconds": [one.seconds for one in found]},
        notes=[f"{sum(one.recalled for one in found)} steps were written from a checkpoint"],
    )
    counts = Counter(who for one in found for who, _ in one.kills)
    for who in (*WITHOUT_CALLER, *WITH_CALLER):
        steps = [step for one in found for name, step in one.kills if name == who]
        report.rows.append((who, str(counts[who]), f"{min(steps)} to {max(steps)}" if steps else ""))
    for number, one in enumerate(found):
        report.notes += [f"sequence {number + 1}, {one.kills}: {line}" for line in one.wrong[:3]]
    right = sum(one.hash is not None and one.hash == expected for one in found)
    proved = sum(not one.wrong for one in found)
    report.targets += [
        Target("sequences with the right hash", 100 * right / len(found), 100, unit=" %"),
        Target("sequences that paceline audit proves", 100 * proved / len(found), 100, unit=" %"),
    ]
    return report


if __name__ == "__main__":
    command.main(run, {"sequences": 0, "seed": SEED})
