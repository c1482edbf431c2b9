"""The gauntlet itself: plans follow from their seed, real runs hold, and a planted mistake is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Parameter

from paceline.core import events, journal
from paceline.core.faults import Fault
from paceline.testing.gauntlet import features, plans, runner
from paceline.testing.gauntlet.attempt import AttemptResult, Gauntlet
from paceline.testing.gauntlet.features import FEATURES, SHARDS
from paceline.train.callbacks import Modifier


@pytest.fixture(scope="module")
def gauntlet() -> Gauntlet:
    return Gauntlet()


@pytest.mark.parametrize("feature", [name for name, setup in FEATURES.items() if setup.quick])
def test_a_disturbed_run_has_the_bits_of_one_process(gauntlet: Gauntlet, feature: str) -> None:
    finding = gauntlet.attempt(feature, seed=1)
    assert not finding.wrong, f"{finding.wrong}\n{finding.plan}"


def test_a_plan_follows_from_feature_and_seed() -> None:
    def drawn(feature: str, seed: int) -> plans.FaultPlan:
        return plans.draw(feature, seed, steps=90, shards=SHARDS)

    assert drawn("sparse", 3) == drawn("sparse", 3)
    assert len({str(drawn(feature, seed)) for feature in ("sparse", "stream") for seed in range(50)}) == 100


def test_plans_hold_every_kind_of_failure() -> None:
    drawn = [plans.draw("dropout", seed, steps=90, shards=SHARDS) for seed in range(300)]
    inside = {fault.kind for plan in drawn for fault in plan.chaos}
    assert inside == {"kill", "stop", "leave"}
    assert {fault.phase for plan in drawn for fault in plan.chaos} >= {"wait", "collective", "checkpoint"}
    outside = {act.kind for plan in drawn for act in plan.outside}
    assert outside == {"kill", "stop", "terminate", "kill supervisor", "kill all", "scale", "end"}
    assert any(plan.resumed_on for plan in drawn)


def test_without_a_supervisor_none_is_asked_or_killed() -> None:
    drawn = [plans.draw("x", seed, steps=90, shards=SHARDS, supervised=False) for seed in range(200)]
    outside = {act.kind for plan in drawn for act in plan.outside}
    assert outside == {"kill", "stop", "terminate", "kill all"}
    assert not any(plan.resumed_on for plan in drawn)


class Forgets(Modifier):
    """A planted mistake: later steps depend on a number that neither a checkpoint nor a transfer holds."""

    def __init__(self) -> None:
        self._seen = 0

    def change_gradients(self, parameters: Mapping[str, Parameter]) -> None:
        self._seen += 1
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 + self._seen / 10.0)


@pytest.fixture
def planted() -> Iterator[str]:
    name = "a modifier that forgets"
    features.add(name, callbacks=lambda: (Forgets(),))
    yield name
    del FEATURES[name]


def test_a_planted_mistake_is_found_and_its_run_is_kept(planted: str, tmp_path: Path) -> None:
    # All are killed, and begin again from a checkpoint that does not hold the modifier's number.
    plan = plans.FaultPlan(2, (Fault(kind="kill", rank=None, step=40, phase="forward"),), ())
    finding = Gauntlet(keep=tmp_path).attempt(planted, 1, plan)
    assert finding.wrong, finding
    kept = list(journal.iterate(Path(finding.kept) / "journal.jsonl"))
    assert any(isinstance(event, events.WorkerFailed) for event in kept)


def test_steps_are_really_skipped_in_the_feature_that_says_so(tmp_path: Path) -> None:
    features.undisturbed(FEATURES["fp16 with skipped steps"], str(tmp_path / "run"))
    steps = journal.iterate(tmp_path / "run" / "journal.jsonl")
    assert any(event.skipped for event in steps if isinstance(event, events.StepCommitted))


def finding(**changes: Any) -> AttemptResult:
    return AttemptResult(**{"feature": "sparse", "seed": 3, "plan": "2 workers", **changes})


def test_the_table_counts_what_went_wrong_and_what_met_nothing() -> None:
    found = [
        finding(met={"views": 3}),
        finding(met={"workers lost": 2, "state transfers": 1}, wrong="other weights"),
        finding(feature="stream", met={"kill": 1}),
    ]
    lines = {line.split()[0]: line.split()[1:] for line in runner.table(found)[2:]}
    assert lines == {
        "sparse": ["2", "1", "2", "1", "1"],
        "stream": ["1", "1", "0", "0", "0"],
        "all": ["3", "2", "2", "1", "1"],
    }


def test_a_finding_travels_between_processes() -> None:
    sent = finding(met={"kill": 1}, wrong="x", seconds=1.5, kept="there")
    assert AttemptResult.from_json(sent.to_json()) == sent


@pytest.mark.leaky("the campaign's processes keep a warm fork server that is ended with them")
def test_a_campaign_runs_plans_in_other_processes(tmp_path: Path) -> None:
    found = list(runner.run([("dropout", 1), ("dropout", 2)], jobs=2, keep=tmp_path))
    assert sorted(one.seed for one in found) == [1, 2]
    assert [one.wrong for one in found] == ["", ""]
