"""The driver of a run: what happens between two groups, without a supervisor or a second process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

import pytest
from tests.train.running import job, mlp, regression, seeded, train
from torch import nn

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.core import events
from paceline.core.errors import GroupInterruptedError
from paceline.train.loop import process_setup
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder, SupervisedHooks
from paceline.train.loop.run_hooks import GroupChangedError, one_group
from paceline.train.loop.worker_jobs import BuiltModel, build, new_team, train_to_end
from paceline.train.state.duty_progress import Duty
from paceline.train.state.model_state import state_hash
from paceline.train.state.resume import resume
from paceline.train.state.run_state import RunState
from paceline.train.stop_signals import StopRequest

DATA = regression(29)
STEPS = 5


class Scripted:
    """Hooks of a member whose group changes at these points: `interrupts` are (step, shards computed)."""

    watches_weights = True

    def __init__(self, pauses: Sequence[int] = (), interrupts: Sequence[tuple[int, int]] = ()) -> None:
        self.pauses, self.interrupts = set(pauses), set(interrupts)
        self.step = 0
        self.computed: list[tuple[int, int]] = []
        self.committed_steps: list[int] = []

    @property
    def wants_pause(self) -> bool:
        if self.step in self.pauses:
            self.pauses.remove(self.step)
            return True
        return False

    def shards_to_compute(
        self, step: int, missing: Sequence[int], lasted: float | None = None
    ) -> Iterator[int]:
        self.step = step
        for done, shard in enumerate([*missing, None]):
            if (step, done) in self.interrupts:
                self.interrupts.remove((step, done))
                raise GroupInterruptedError("a member is lost")
            if shard is not None:
                yield shard
                self.computed.append((step, shard))

    def committed(
        self, state: RunState, step: events.StepCommitted, shards: tuple[int, ...], hashes: Mapping[int, str]
    ) -> None:
        self.committed_steps.append(step.step)

    def replicas_agree(self, state: RunState, digest: str) -> None: ...

    def comparison_interrupted(self, state: RunState, digest: str) -> None: ...

    def replicas_differ(self, state: RunState, digest: str) -> NoReturn:
        raise AssertionError("a rank that is alone differs from nothing")


def drive(
    hooks: Scripted, walk: Callable[[Run, BuiltModel], None], model: Callable[[], nn.Module] = mlp
) -> str:
    """Build a run with these hooks, begin it as the first view would, and hand it to `walk`."""
    given = job(model(), DATA, max_steps=STEPS)
    with ExitStack() as stack:
        stack.enter_context(process_setup.prepared(given.config))
        built = build(given, stack, 0)
        team = new_team(stack.enter_context(DistributedContext(1, 0)), given.config)
        supervised = SupervisedHooks(hooks, hooks, lambda event: None, time.monotonic, slot=0)
        builder = RunBuilder(team, built.spec, built.device, StopRequest(), hooks=supervised)
        run = stack.enter_context(builder).run()
        resume(run.state, None)
        walk(run, built)
        return state_hash(built.module)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return train(job(mlp(), DATA, max_steps=STEPS)).hash


@pytest.mark.parametrize(
    ("pauses", "interrupts"),
    [
        ([2], []),
        ([], [(1, 0)]),
        ([], [(3, 4)]),
        ([], [(5, 6)]),
        ([1, 2, 5], [(1, 1), (2, 0), (4, 5), (5, 2)]),
    ],
    ids=["pause", "before the first shard", "within a step", "after its last shard", "again and again"],
)
def test_a_run_whose_group_changes_comes_to_the_same_bits(pauses, interrupts, undisturbed):
    hooks, causes = Scripted(pauses, interrupts), []

    def walk(run: Run, built: BuiltModel) -> None:
        def rejoin(cause: BaseException | None) -> None:
            causes.append(cause)
            run.parts.team.install(DistributedContext.from_transport(single_rank()))
            run.state.rebind()
            run.state.synchronize(0, [])

        train_to_end(run, built, rejoin)
        assert run.state.agenda.concluded

    assert drive(hooks, walk) == undisturbed
    assert hooks.committed_steps == list(range(1, STEPS + 1))
    assert len([cause for cause in causes if cause is None]) == len(pauses)
    assert len([cause for cause in causes if isinstance(cause, GroupInterruptedError)]) == len(interrupts)
    # What was held was not computed again: every shard of every step once.
    assert sorted(hooks.computed) == [(step, shard) for step in range(1, STEPS + 1) for shard in range(6)]


def test_a_step_of_shards_that_belong_together_is_computed_again_as_a_whole():
    def synced() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.SyncBatchNorm(6), nn.Linear(6, 2)))

    def walk(run: Run, built: BuiltModel) -> None:
        def rejoin(cause: BaseException | None) -> None:
            assert run.parts.transaction.held == ()
            run.parts.team.install(DistributedContext.from_transport(single_rank()))
            run.state.rebind()
            run.state.synchronize(0, [])

        train_to_end(run, built, rejoin)

    hooks = Scripted([2], [(1, 0), (3, 4), (5, 6)])
    assert drive(hooks, walk, synced) == train(job(synced(), DATA, max_steps=STEPS)).hash
    assert hooks.computed.count((3, 0)) == 2
    assert hooks.committed_steps == list(range(1, STEPS + 1))


def test_without_a_driver_that_rejoins_the_change_is_raised():
    def walk(run: Run, built: BuiltModel) -> None:
        with pytest.raises(GroupChangedError) as caught:
            train_to_end(run, built)
        assert isinstance(caught.value.cause, GroupInterruptedError)
        assert run.state.position.step == 2
        with pytest.raises(GroupInterruptedError, match="a member is lost") as failure, one_group():
            train_to_end(run, built)
        assert failure.value.__context__ is None

    drive(Scripted(interrupts=[(3, 1), (4, 0)]), walk)


def test_a_group_that_goes_back_to_the_beginning_while_it_concludes_trains_again(undisturbed):
    """As where a member was lost with state that no other has: the end is not the end."""
    went_back: list[int] = []

    def walk(run: Run, built: BuiltModel) -> None:
        fresh = {name: tensor.clone() for name, tensor in built.module.state_dict().items()}
        ended = run.duties.do

        def rejoin(cause: BaseException | None) -> None:
            went_back.append(run.state.position.step)
            built.module.load_state_dict(fresh)
            for optimizer in run.parts.optimizers:
                optimizer.state.clear()
            resume(run.state, None, fresh=False)

        def once(duty: Duty, numbers: Sequence[int]) -> None:
            if run.state.agenda.concluding and not went_back:
                raise GroupInterruptedError("a member is lost")
            ended(duty, numbers)

        run.duties.do = once  # type: ignore[method-assign]
        train_to_end(run, built, rejoin)

    hooks = Scripted()
    assert drive(hooks, walk) == undisturbed
    assert went_back == [STEPS]
    assert hooks.committed_steps == [*range(1, STEPS + 1), *range(1, STEPS + 1)]
