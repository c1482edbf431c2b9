"""In a supervised view the rank that a person reads is the slot, whatever the view index is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.member.small_member import alone_in, member
from tests.train.running import mlp, settings
from tests.train.state.savers import SHARED, saver_of

from paceline.comm.context import DistributedContext
from paceline.core import events
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.data.batch_plan import DataPosition
from paceline.testing.thread_transport import run_ranks
from paceline.train.callbacks import Callbacks, Modifier
from paceline.train.loop import finalize
from paceline.train.state import modifier_states, resume
from paceline.train.state.checkpointing import RunContents
from paceline.train.team import Team

SLOTS = (4, 7, 9)
CPU = {"torch": "2", "instructions": "AVX2"}


def on_slots(fn: Any, *args: Any) -> list[Any]:
    return run_ranks(len(SLOTS), fn, *args, labels=SLOTS)


def start(context: DistributedContext, odd: dict[str, str], fresh: list[bool]) -> None:
    mine = mlp()
    if context.rank == 2:
        with torch.no_grad():
            next(mine.parameters()).add_(1.0)
    facts = {**CPU, **odd} if context.rank == 1 else CPU
    resume.check_same_start(context, settings(), facts, mine, fresh=fresh[context.rank])


def test_a_rank_that_computes_other_bits():
    with pytest.raises(PlatformError, match="rank 7 would not compute the same bits"):
        on_slots(start, {"instructions": "NEON"}, [False] * 3)


@pytest.mark.parametrize(("fresh", "first"), [([True] * 3, 4), ([False, True, True], 7)])
def test_a_rank_that_starts_with_other_weights(fresh, first):
    """Compared with the first rank that has its initial weights: one that has trained has none to compare."""
    with pytest.raises(UsageError, match=f"the model of rank 9 does not .* the weights of rank {first}'s"):
        on_slots(start, {}, fresh)


def start_in(context: DistributedContext, precision: list[Any]) -> None:
    resume.check_same_start(context, settings(precision=precision[context.rank]), CPU, mlp())


def test_a_rank_that_has_other_settings():
    on_slots(start_in, ["bf16"] * 3)
    with pytest.raises(ConfigError, match="rank 9 has other settings than rank 4: precision: fp32 -> bf16"):
        on_slots(start_in, ["fp32", "fp32", "bf16"])


class Counts(Modifier):
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


def test_a_modifier_that_differs():
    def compare(context: DistributedContext) -> None:
        modifier_states.compare(context, Callbacks([Counts(int(context.rank == 2))]), 3)

    with pytest.raises(UsageError, match="another state on rank 9 than on rank 4 after step 3"):
        on_slots(compare)


def test_a_part_of_a_checkpoint_that_is_not_what_all_agreed_on(tmp_path):
    """View index 0 does not see the place: 1 is the first writer, and what 2 writes differs."""

    def save(context: DistributedContext, place: Path) -> list[events.Event]:
        told: list[events.Event] = []
        saver = saver_of(context, place, told, writes=context.rank > 0)
        contents = RunContents(SHARED, {}, {})
        agreed = saver.digests(contents)
        shares = [agreed[0], "something else"]
        saver.begin(DataPosition(step=7), contents, {}, shares)
        assert saver._writer.label == (context.rank and SLOTS[context.rank])
        saver.drain()
        saver.close()
        return told

    _, told, _ = on_slots(save, tmp_path)
    (failed,) = told
    assert isinstance(failed, events.CheckpointFailed)
    assert failed.reason == "rank 9: what it wrote is not what all ranks hold"


def test_a_writer_that_refuses_a_tensor(tmp_path):
    def save(context: DistributedContext, place: Path) -> str:
        saver = saver_of(context, place, [], writes=True)
        both = RunContents(SHARED, dict(SHARED), {})
        with pytest.raises(UsageError) as refused:
            saver._writer.save(1, both.tensors, own=both.own)
        saver.close()
        return str(refused.value).splitlines()[0]

    assert [line.split()[-3:] for line in on_slots(save, tmp_path)] == [
        ["rank", f"{slot}'s", "own"] for slot in SLOTS
    ]


def test_a_member_that_loads_a_state_of_another_processor():
    with member() as one:
        one.join(replace(alone_in(1, restore=True), slots=(6,)))
        saved = one.run.state.export()
        with pytest.raises(PlatformError, match="rank 6 would not compute the same bits"):
            one.run.state.load({**saved.state, "fingerprint": CPU}, saved.tensors)


def test_a_member_that_saves_alone_keeps_its_rank(tmp_path):
    with member(tmp_path / "run") as one:
        one.join(replace(alone_in(1, restore=True), slots=(6,)))
        one.train()
        finalize.save_alone(one.run)
        team: Team = one.run.parts.team
        assert (team.rank, list(team.context.labels)) == (0, [6])
        assert one.run.parts.checkpointer is not None
        assert one.run.parts.checkpointer.newest_step == one.run.state.position.step
