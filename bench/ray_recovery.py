"""Paceline on Ray against Ray Train, on the same Ray: seconds until training is past the step it had reached.

    python -m bench.ray_recovery [--quick] [--rounds N]

Cases, contenders in turns:

- a worker is killed, as in bench.recovery.against_peers: one of four, on a local cluster
- a node is lost: one of four raylets, with all that runs on it, on a cluster; Ray Train is elastic
- a node is added to the three that are left: until a step is committed by all four workers (the clock starts
  when Ray lists the node), and for how long training stood still for it: from the last step without it to the
  first one that had not been reached
- both again with steps that wait as for an accelerator. Nodes of this machine share its cores: with steps
  that compute, whatever is started has to share them with all workers, which a node of its own would not

Run it with an environment that has Ray and Paceline: .venv-engines/bin/python (`make test-engines` makes it).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.recovery import command, contenders, kill_one, workload
from bench.recovery.against_peers import measure
from bench.recovery.contenders import PACELINE_ON_RAY, RAY
from bench.recovery.kill_one import Reader
from bench.recovery.processes import ROOT, Family
from bench.recovery.run_journal import JournalReader
from bench.recovery.step_log import Line, StepReader
from bench.report import Report, Target
from paceline.core.errors import CommTimeoutError, PacelineError, RankFailedError, UnavailableError
from paceline.testing.ray_cluster import RayCluster

WANTED_KILL = 20.0
WANTED_NODES = 10.0
_NAMES = "abcd"
_SETTLE_STEPS = 60
_START_SECONDS = 120.0
_RECOVER_SECONDS = 240.0
_ENDLESS_STEPS = 10_000_000
_FORGET_SECONDS = 30.0
_DEVICE_MS = "50"


@dataclass(frozen=True)
class Elastic:
    """A contender on a cluster: how it is started there, and how its steps are read."""

    name: str
    start: Callable[[Family, Path, str], None]
    reader: Callable[[Path], Reader]


PACELINE_NODES = Elastic(
    "Paceline on Ray",
    lambda family, folder, address: contenders.start_paceline_on_ray(
        family, folder, _ENDLESS_STEPS, address, workload.WORKERS
    ),
    JournalReader,
)
RAY_NODES = Elastic(
    "Ray Train",
    lambda family, folder, address: contenders.start_elastic_ray(
        family, folder, _ENDLESS_STEPS, address, workload.WORKERS - 2
    ),
    StepReader,
)


@dataclass
class Times:
    """Seconds of a case, of each contender."""

    case: str
    wanted: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # rounds of Paceline without an outcome

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)
        print(f"{self.case}, {name}: {seconds:.2f} s", flush=True)

    def row(self, name: str) -> Sequence[str]:
        found = self.seconds.get(name, [])
        if not found:
            return (self.case, name, "did not recover", "", "")
        return (
            self.case,
            name,
            f"{median(found):.2f}",
            f"{min(found):.2f} - {max(found):.2f}",
            str(len(found)),
        )

    def target(self) -> list[Target]:
        ours, theirs = (self.seconds.get(name, []) for name in (PACELINE_ON_RAY.name, RAY.name))
        if not ours and not self.failures:
            return []  # not asked for
        if not ours or not theirs:
            return [
                Target(f"{self.case}: {'Ray Train' if ours else 'Paceline'} has no outcome", 0, self.wanted)
            ]
        least = min(theirs) / max(ours)
        what = f"{self.case}: ahead of Ray Train (worst of ours to best of theirs: {least:.1f}x)"
        return [Target(what, median(theirs) / median(ours), self.wanted)]


def _groups(lines: Sequence[Line]) -> dict[str, set[int]]:
    """Return the ranks that each group of workers was seen with."""
    found: dict[str, set[int]] = {}
    for line in lines:
        found.setdefault(line.group, set()).add(line.rank)
    return found


def _wait(
    family: Family, reader: Reader, seconds: float, what: str, found: Callable[[list[Line]], float]
) -> float:
    """Return what `found` has in the lines, once it is more than 0."""
    deadline = time.monotonic() + seconds
    while not (result := found(reader.read())):
        if not family.running():
            raise RankFailedError(f"{what}: the run ended with {family.status()}\n{family.tail()}")
        if time.monotonic() > deadline:
            raise CommTimeoutError(f"{what}: not within {seconds:.0f} s\n{family.tail()}")
        time.sleep(kill_one.LOOK_SECONDS)
    return result


def _settled(lines: list[Line]) -> float:
    """Return the step of a group of all workers that has taken some steps."""
    if not lines:
        return 0.0
    newest = lines[-1].group
    own = [line for line in lines if line.group == newest]
    full = len({line.rank for line in own}) == workload.WORKERS
    return float(lines[-1].step) if full and own[-1].step - own[0].step >= _SETTLE_STEPS else 0.0


def _later(moment: float) -> Callable[[list[Line]], float]:
    return lambda lines: next((line.time for line in reversed(lines) if line.time > moment), 0.0)


def _pause(lines: list[Line]) -> float:
    """Return for how long no step was committed that had not been before, when the newest group took over."""
    newest = lines[-1].group
    old = [line for line in lines if line.group != newest]
    reached = max(line.step for line in old)
    times = [line.time for line in lines if line.group == newest and line.step > reached]
    return min(times) - max(line.time for line in old if line.step == reached) if times else 0.0


def lose_and_add(contender: Elastic, folder: Path, lost: Times, added: Times, paused: Times) -> None:
    """One run on a cluster of four nodes: a node is lost, and another one is added."""
    folder.mkdir(parents=True)
    environment = {**contenders.RAY_ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as ray_folder,
        RayCluster(Path(ray_folder), environment, with_services=False, cpus=1) as cluster,
        Family(folder / "output.log") as family,
    ):
        for name in _NAMES:
            cluster.add(name)
        with _variables(RAY_TMPDIR=ray_folder):
            contender.start(family, folder, cluster.address)
        reader = contender.reader(folder)
        _wait(family, reader, _START_SECONDS, "four workers", _settled)

        killed = time.time()
        old = reader.read()[-1].group
        cluster.kill(_NAMES[-1])

        def past(lines: list[Line]) -> float:
            # A step that the old group had decided before the kill may be written after it.
            reached = max(line.step for line in lines if line.group == old)
            times = [line.time for line in lines if line.group != old and line.step > reached]
            return min(times, default=0.0)

        lost.add(contender.name, _wait(family, reader, _RECOVER_SECONDS, "a lost node", past) - killed)

        # Until everyone has seen that the node is gone, which takes Ray a quarter of a minute.
        _wait(family, reader, _RECOVER_SECONDS, "the steps after it", _later(killed + _FORGET_SECONDS))
        cluster.add("e")
        there = time.time()

        def all_workers(lines: list[Line]) -> float:
            new = [line for line in lines if line.time > there]
            groups = _groups(new)
            times = [line.time for line in new if len(groups[line.group]) == workload.WORKERS]
            return min(times, default=0.0)

        added.add(
            contender.name, _wait(family, reader, _RECOVER_SECONDS, "an added node", all_workers) - there
        )
        paused.add(contender.name, _wait(family, reader, _RECOVER_SECONDS, "steps with it", _pause))


def _round(contender: Elastic, folder: Path, times: tuple[Times, Times, Times]) -> None:
    """One run of a contender; the rounds after one that failed are measured all the same."""
    try:
        lose_and_add(contender, folder, *times)
    except PacelineError as error:
        print(f"{times[0].case}, {contender.name}: {error}", flush=True)
        if contender is PACELINE_NODES:
            times[0].failures.append(str(error))


def _node_times(suffix: str) -> tuple[Times, Times, Times]:
    names = ("node lost", "node added, until it computes", "node added, training stands still")
    lost, added, paused = (Times(name + suffix, WANTED_NODES) for name in names)
    return lost, added, paused


@contextlib.contextmanager
def _variables(**values: str):  # type: ignore[no-untyped-def]
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run(quick: bool = False, rounds: int = 3, cases: str = "kill,nodes,device") -> Report:
    """Seconds until training is past the step it had reached, for Paceline on Ray and for Ray Train."""
    if importlib.util.find_spec("ray") is None:
        raise UnavailableError("Ray is not installed here", remedy="use the Python of .venv-engines")
    rounds, steps = (1, 200) if quick else (rounds, 400)
    killed = Times("worker killed", WANTED_KILL)
    computing, waiting = _node_times(""), _node_times(", steps wait for a device")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="paceline-ray-") as place:
        if "kill" in cases:
            for row in measure((PACELINE_ON_RAY, RAY), rounds, steps, Path(place)):
                ours = row.contender is PACELINE_ON_RAY
                killed.failures += row.failed if ours else ()
                for outcome in row.outcomes:
                    killed.add(row.contender.name, outcome.seconds)
                    wrong += ours and outcome.hash not in row.right
        for number in range(rounds):
            for contender in (PACELINE_NODES, RAY_NODES):
                folder = Path(place, f"{number}-{contender.name.split()[0]}")
                if "nodes" in cases:
                    _round(contender, folder / "nodes", computing)
                if "device" in cases:
                    with _variables(**{workload.DEVICE_MS: _DEVICE_MS}):
                        _round(contender, folder / "device", waiting)
    all_times = (killed, *computing, *waiting)
    report = Report(
        "ray_recovery",
        f"Paceline on Ray and Ray Train, {workload.WORKERS} workers, MLP of 1 M parameters, "
        f"{len(os.sched_getaffinity(0))} cores: seconds until training is past the step it had reached",
        ("case", "contender", "median", "range", "rounds"),
        data={"seconds": {times.case: times.seconds for times in all_times}},
    )
    for times in all_times:
        report.rows += [times.row(name) for name in (PACELINE_ON_RAY.name, RAY.name) if times.seconds]
        report.targets += times.target()
    report.notes.append(f"steps that wait for a device: {_DEVICE_MS} ms in every pass, by sleeping")
    report.notes.append("node added: until a step of all four workers, from the moment Ray lists the node")
    report.notes.append(
        "Ray Train: health check every 0.2 s; elastic on nodes, looks for added ones every 5 s (default 60)"
    )
    if killed.seconds:
        report.targets.append(Target("Paceline's final hash wrong", wrong, 0, at_least=False, unit=""))
    failed = sum(len(times.failures) for times in all_times)
    report.targets.append(
        Target("rounds in which Paceline did not recover", failed, 0, at_least=False, unit="")
    )
    return report


if __name__ == "__main__":
    command.main(run, {"rounds": 3, "cases": "kill,nodes,device"})
