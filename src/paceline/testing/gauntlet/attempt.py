"""One run of the gauntlet: disturb it by its plan, and compare what came out with the undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from paceline.core import events, journal
from paceline.core.chaos_spec import Chaos
from paceline.core.errors import PeerLostError
from paceline.elastic.machine.job_end import BEFORE_THE_FIRST_STEP
from paceline.monitor.audit import audit
from paceline.testing.gauntlet.features import FEATURES, SHARDS, FeatureSetup, RunResult, undisturbed
from paceline.testing.gauntlet.outside_faults import OutsideFaults
from paceline.testing.gauntlet.plans import FaultPlan, draw
from paceline.train.stop_signals import Stopped


@final
@dataclass(frozen=True)
class AttemptResult:
    """Result of one run. `wrong` is empty where weights, losses and audit are right; `met` counts the
    failures that really came; `kept` is the folder of a run that went wrong."""

    feature: str
    seed: int
    plan: str
    wrong: str = ""
    met: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    kept: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AttemptResult:
        return cls(**json.loads(text))


@final
class Gauntlet:
    """Runs of plans in this process, and of each feature once undisturbed. `keep`: where wrong runs stay."""

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep
        self._references: dict[str, RunResult] = {}

    def attempt(self, feature: str, seed: int, plan: FaultPlan | None = None) -> AttemptResult:
        """Run the plan of this seed, or another one."""
        setup = FEATURES[feature]
        expected = self._reference(setup)
        if plan is None:
            steps = len(expected.losses)
            plan = draw(
                feature,
                seed,
                steps=steps,
                shards=SHARDS,
                inside=setup.takes_chaos,
                supervised=setup.supervised,
            )
        with tempfile.TemporaryDirectory(prefix="paceline-gauntlet-") as temporary:
            folder = Path(temporary, "run")
            began = time.monotonic()
            met: Counter[str] = Counter()
            try:
                wrong = _compare(_disturbed(setup, plan, folder, met), expected, folder, setup)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            met += _met(folder)
            kept = self._leave(folder, f"{feature}-{seed}") if wrong else ""
        return AttemptResult(feature, seed, str(plan), wrong, dict(met), time.monotonic() - began, kept)

    def _reference(self, setup: FeatureSetup) -> RunResult:
        if setup.name not in self._references:
            with tempfile.TemporaryDirectory(prefix="paceline-gauntlet-") as temporary:
                self._references[setup.name] = undisturbed(setup, str(Path(temporary, "run")))
        return self._references[setup.name]

    def _leave(self, folder: Path, name: str) -> str:
        if self._keep is None or not folder.exists():
            return ""
        target = self._keep / name.replace(" ", "-")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.secret"))
        return str(target)


def _disturbed(setup: FeatureSetup, plan: FaultPlan, folder: Path, met: Counter[str]) -> RunResult:
    """Train to the end, over all planned starts of the run."""
    care: dict[str, Any] = {"chaos": str(Chaos(*plan.chaos))} if plan.chaos else {}
    starts = [(plan.workers, None), *((workers, "auto") for workers in plan.resumed_on)]
    acts = plan.outside
    while True:
        workers, resume = starts.pop(0)
        # A run that is resumed may stop short of a failure's step again: its failures are behind it.
        config = setup.config(str(folder), workers, resume=resume, care=care if resume is None else {})
        try:
            with OutsideFaults(folder, acts) as assault:
                return setup.run(config)
        except (Stopped, PeerLostError) as ended:
            if BEFORE_THE_FIRST_STEP in str(ended):
                # The supervisor takes it for a script that cannot start; its user starts it again.
                starts.insert(0, (workers, "auto"))
            # Workers that are all lost while a run stops cannot save: an earlier checkpoint is resumed.
            elif not starts or (isinstance(ended, PeerLostError) and not assault.done["end"]):
                raise
            acts = ()
        finally:
            met += assault.done
            if assault.error is not None:
                raise assault.error


def _compare(found: RunResult, expected: RunResult, folder: Path, setup: FeatureSetup) -> str:
    """Return what is wrong with a run that ended, in one line."""
    if not setup.supervised:
        return "" if found == expected else f"the result is {found} instead of {expected}"
    differences = []
    lines = list(journal.iterate(folder / "journal.jsonl"))
    recorded = {event.step: event.loss for event in lines if isinstance(event, events.StepCommitted)}
    differing = [step for step, loss in enumerate(expected.losses, 1) if recorded.get(step) != loss]
    if differing and setup.takes_chaos:
        first = differing[0]
        differences.append(
            f"{len(differing)} losses differ, the first in step {first}: "
            f"{recorded.get(first)} instead of {expected.losses[first - 1]}"
        )
    measured = [event for event in lines if isinstance(event, events.Evaluated)]
    odd = [one.step for one in measured if dict(one.metrics) != expected.evaluations.get(one.step)]
    odd += sorted(set(expected.evaluations) - {one.step for one in measured})
    if odd and setup.takes_chaos:
        differences.append(f"the evaluations after steps {odd} differ or are missing")
    if found.hash != expected.hash:
        differences.append(f"the weights are {found.hash[:16]} instead of {expected.hash[:16]}")
    proof = audit(journal.iterate(folder / "journal.jsonl"), backup=setup.care.get("stragglers") == "backup")
    differences += [f"the audit says: {line}" for line in proof.wrong]
    return "; ".join(differences)


def _met(folder: Path) -> Counter[str]:
    file = folder / "journal.jsonl"
    counted: Counter[str] = Counter()
    for event in journal.iterate(file) if file.exists() else ():
        if isinstance(event, events.FaultInjected):
            counted[f"injected {event.fault.split()[0]}"] += 1
        elif isinstance(event, events.WorkerFailed):
            counted["workers lost"] += 1
        elif isinstance(event, events.ViewChanged):
            counted["views"] += 1
            counted["state transfers"] += len(event.behind)
    return counted
