"""Minutes of random faults of all kinds: the right hash at the end, and nothing that grows.

Faults come from inside (`random` chaos: kills, exits, hangs, slow, cut off and corrupted workers, requests to
leave) and from outside: SIGKILL and SIGSTOP of workers, SIGKILL of the supervisor. Every second the caller's,
the supervisor's and the workers' memory, descriptors and threads are read, and the journal's size; after a
warm-up a line is fitted to each. Then an undisturbed run of as many steps gives the hash to compare with.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.recovery import command, workload
from bench.recovery.processes import Family
from bench.recovery.run_journal import RunJournal
from bench.recovery.supervised_run import NO_BACKOFF, RunSettings
from bench.recovery.vitals import Sample, Vital, slope, typical, vital
from bench.report import Report, Target
from paceline.core.errors import UsageError
from paceline.train.stop_signals import STOPPED_EXIT_CODE

MINUTES = 10.0
QUICK_MINUTES = 1.0
SEED = 11
STEPS = 10_000_000
# With 4 workers and steps of 20 ms, one in about ten seconds that ends a worker (what hangs, hangs for ever),
# and one in about twenty that passes.
CHAOS = (
    "random kinds=kill,exit,raise,stop,hang,deadlock,oom,leave,corrupt rate=0.0005 seed={seed}; "
    "random kinds=slow,partition,hang,stop rate=0.00025 for=2s factor=3 seed={other}"
)
OUTSIDE_SECONDS = (3.0, 9.0)
SUPERVISOR_EVERY = 6  # of the faults from outside, so many to one that kills the supervisor
CHECKPOINT_EVERY = 200
WARMUP_SHARE = 0.25
# In less time, workers that were just replaced look like growth.
LEAST_MINUTES = 4.0
START_SECONDS = 120.0
END_SECONDS = 180.0
# What a step, a view, a fault may take in the journal; docs state it.
BYTES_A_STEP = 400
BYTES_A_FAULT = 6000


def soak(settings: RunSettings, minutes: float, seed: int) -> tuple[list[Sample], Counter[str], RunJournal]:
    """The disturbed run: what was seen each second, which faults came from outside, and its journal."""
    dice = random.Random(seed)
    journal = RunJournal(settings.journal)
    samples: list[Sample] = []
    done: Counter[str] = Counter()
    with Family(Path(settings.run_dir).with_suffix(".log")) as family:
        caller = family.start(settings.command())
        journal.wait_until(lambda now: now.step >= 5, family, START_SECONDS)
        began = time.monotonic()
        next_fault = began + dice.uniform(*OUTSIDE_SECONDS)
        stopped: list[int] = []
        while (now := time.monotonic()) < began + 60.0 * minutes:
            if not family.running():
                raise UsageError(f"the run ended at step {journal.step}\n{family.tail()}")
            samples.append(_look(now - began, caller, journal.read(), family, settings))
            if now >= next_fault:
                done[_disturb(journal, dice, stopped)] += 1
                next_fault = now + dice.uniform(*OUTSIDE_SECONDS)
            time.sleep(max(0.0, 1.0 - (time.monotonic() - now)))
        _resume(stopped)
        os.kill(caller, signal.SIGTERM)
        status = family.wait(0, END_SECONDS)
        if status != STOPPED_EXIT_CODE:
            raise UsageError(f"the run ended with {status} when asked to stop\n{family.tail()}")
    return samples, done, journal.read()


def _look(seconds: float, caller: int, journal: RunJournal, family: Family, settings: RunSettings) -> Sample:
    folder = Path(settings.run_dir)
    return Sample(
        seconds=seconds,
        step=journal.step,
        caller=vital(caller),
        supervisor=vital(journal.supervisors[-1].pid),
        workers=typical([vital(pid) for pid in journal.views[-1].pids]),
        processes=len(family.descendants()),
        journal=journal.bytes,
        events=journal.count,
        disk=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )


def _disturb(journal: RunJournal, dice: random.Random, stopped: list[int]) -> str:
    """One fault from outside; gives its name."""
    _resume(stopped)
    if dice.randrange(SUPERVISOR_EVERY) == 0:
        return _send(journal.supervisors[-1].pid, signal.SIGKILL, "SIGKILL of the supervisor")
    pid = dice.choice(journal.views[-1].pids)
    if dice.random() < 0.5:
        return _send(pid, signal.SIGKILL, "SIGKILL of a worker")
    stopped.append(pid)
    return _send(pid, signal.SIGSTOP, "SIGSTOP of a worker")


def _send(pid: int, number: signal.Signals, name: str) -> str:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return "came too late"
    return name


def _resume(stopped: list[int]) -> None:
    """Workers that were stopped and not replaced meanwhile may go on."""
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    stopped.clear()


def run(quick: bool = False, minutes: float = 0.0, seed: int = SEED) -> Report:
    """Random faults for ten minutes: the final hash, and growth of memory, descriptors, threads, journal."""
    length = minutes or (QUICK_MINUTES if quick else MINUTES)
    chaos = CHAOS.format(seed=seed, other=seed + 1)
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as folder:
        settings = RunSettings(
            str(Path(folder, "disturbed")),
            STEPS,
            chaos=chaos,
            checkpoint_every=CHECKPOINT_EVERY,
            backoff=NO_BACKOFF,
        )
        samples, outside, journal = soak(settings, length, seed)
        calm = RunSettings(str(Path(folder, "calm")), journal.step)
        with Family(Path(folder, "calm.log")) as family:
            family.start(calm.command())
            family.finish(60.0 + journal.step * 0.3)
        final = settings.final_hash()
        equal = final is not None and final == calm.final_hash()
        unproved = settings.unproved()
        if not equal or unproved:
            # For `paceline audit` and `replay`: what went wrong does not come again for the asking.
            kept = tempfile.mkdtemp(prefix="paceline-soak-wrong-")
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            print(f"this went wrong; both runs are kept in {kept}", file=sys.stderr, flush=True)
    return _report(samples, outside, journal, equal, unproved, length)


def _report(
    samples: Sequence[Sample],
    outside: Counter[str],
    journal: RunJournal,
    equal: bool,
    unproved: Sequence[str],
    minutes: float,
) -> Report:
    kept = [sample for sample in samples if sample.seconds > WARMUP_SHARE * 60.0 * minutes]
    inside = Counter(failure.cause or failure.reason for failure in journal.failures)
    report = Report(
        "recovery_soak",
        f"{minutes:g} minutes of random faults, {workload.WORKERS} workers, {journal.step} steps",
        ("what", "at first", "at the end", "growth a minute"),
        data={"samples": [_plain(sample) for sample in samples], "outside": outside, "failures": inside},
        notes=[
            "from outside: " + ", ".join(f"{count} {name}" for name, count in sorted(outside.items())),
            "workers lost: " + ", ".join(f"{count} {name}" for name, count in sorted(inside.items())),
            f"{len(journal.views)} views, {len(journal.verdicts)} verdicts, "
            f"{len(journal.supervisors)} supervisors",
            *unproved,
        ],
    )
    for who, of in _WHO.items():
        for what, (get, unit, limit) in _WHAT.items():
            name, value = f"{who}: {what}", _value(of, get)
            report.rows.append(_row(name, kept, value, unit))
            if minutes >= LEAST_MINUTES:
                growth = slope(kept, value) / unit
                report.targets.append(Target(f"{name}, growth a minute", growth, limit, False, ""))
    steps = kept[-1].step - kept[0].step
    stated = BYTES_A_STEP * steps + BYTES_A_FAULT * (len(journal.failures) + sum(outside.values()))
    grown = kept[-1].journal - kept[0].journal
    report.rows.append(_row("processes", kept, lambda sample: sample.processes, 1))
    report.rows.append(_row("journal, KB", kept, lambda sample: sample.journal, 1e3))
    report.rows.append(_row("run's folder, MB", kept, lambda sample: sample.disk, 1e6))
    report.notes.append(f"journal: {grown / max(1, steps):.0f} bytes a step, faults included")
    report.targets += [
        Target("journal, of its stated rate", grown / max(1, stated), 1.0, at_least=False, unit=""),
        Target("what paceline audit finds wrong", len(unproved), 0, at_least=False, unit=""),
        Target("final hash equal to the undisturbed run's", float(equal), 1, unit=""),
    ]
    return report


def _row(
    name: str, kept: Sequence[Sample], value: Callable[[Sample], float | None], unit: float
) -> list[str]:
    found = [number / unit for sample in kept if (number := value(sample)) is not None]
    tenth = max(1, len(found) // 10)
    if not found:
        return [name, "", "", ""]
    first, last = sum(found[:tenth]) / tenth, sum(found[-tenth:]) / tenth
    return [name, f"{first:.1f}", f"{last:.1f}", f"{slope(kept, value) / unit:+.2f}"]


def _value(
    of: Callable[[Sample], Vital | None], get: Callable[[Vital], float]
) -> Callable[[Sample], float | None]:
    def value(sample: Sample) -> float | None:
        found = of(sample)
        return None if found is None else get(found)

    return value


_WHO: dict[str, Callable[[Sample], Vital | None]] = {
    "caller": lambda sample: sample.caller,
    "supervisor": lambda sample: sample.supervisor,
    "workers": lambda sample: sample.workers,
}
# How it is read, the unit it is shown in, and how much a minute is still no growth.
_WHAT: dict[str, tuple[Callable[[Vital], float], float, float]] = {
    "memory, MB": (lambda found: found.rss, 1e6, 1.0),
    "descriptors": (lambda found: found.descriptors, 1.0, 0.5),
    "threads": (lambda found: found.threads, 1.0, 0.2),
}


def _plain(sample: Sample) -> dict[str, object]:
    return {name: vars(value) if isinstance(value, Vital) else value for name, value in vars(sample).items()}


if __name__ == "__main__":
    command.main(run, {"minutes": 0.0, "seed": SEED})
