"""A step is a transaction: given up in the middle and done again, even with the shards dealt in another way,
it has the bits of a step that nothing disturbed."""

from __future__ import annotations

import copy
import gc
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.ranks import sha
from tests.train.running import job, mlp, regression, seeded, settings, train
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.context import DistributedContext
from paceline.core.errors import GroupInterruptedError, InternalError
from paceline.data.batch_plan import assign
from paceline.testing import leaks
from paceline.testing.thread_transport import run_ranks
from paceline.train.settings.train_config import GradientCompression
from paceline.train.state.model_state import state_hash
from paceline.train.step.gradient_reducer import GradientChecks
from paceline.train.step.step_counters import StepRequests
from paceline.train.step.transaction import StepTransaction
from paceline.train.team import Team

X, Y = regression(12)
SHARDS = 4
COUNTS = [3, 3, 3, 3]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 5, sparse=True)
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + self.words((x[:, 0] > 0).long()))


def compute(transaction: StepTransaction, module: nn.Module, shard: int) -> None:
    transaction.start_shard(shard)
    part = slice(3 * shard, 3 * shard + 3)
    transaction.backward(F.mse_loss(module(X[part]), Y[part]), 3)
    transaction.finish_shard(shard)


def gradients(module: nn.Module) -> list[Tensor]:
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.to_dense().clone())
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"compression": GradientCompression(kind="int8")},
        {"mode": "fast", "shards": 1, "workers": 1},
        {"shards": 1},
    ],
    ids=["exact", "compressed", "fast", "one shard"],
)
def test_a_step_that_was_given_up_leaves_nothing(given: dict[str, Any]) -> None:
    config = settings(**{"shards": SHARDS, **given})
    model = seeded(Model)

    def run(disturbed: bool) -> tuple[list[list[Tensor]], str]:
        module = copy.deepcopy(model)
        found = []
        with DistributedContext(1, 0) as context:
            team = Team(context, config.shards)
            transaction = StepTransaction(team, module, config, torch.device("cpu"))
            shards = list(assign(team.shards, context.world_size)[context.rank])
            counts = COUNTS[: len(shards)]
            for step in range(3):
                if disturbed and step == 1:
                    before = state_hash(module)
                    transaction.open(0, step, counts)
                    for shard in shards[:2]:
                        compute(transaction, module, shard)
                    transaction.abandon()
                    assert state_hash(module) == before
                    assert all(parameter.grad is None for parameter in module.parameters())
                transaction.open(0, step, counts)
                for shard in shards:
                    compute(transaction, module, shard)
                assert transaction.reduce().applied == sum(counts)
                transaction.updated()
                found.append(gradients(module))
        return found, state_hash(module)

    undisturbed, disturbed = run(False), run(True)
    assert undisturbed[1] == disturbed[1]
    for mine, theirs in zip(undisturbed[0], disturbed[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_step_that_goes_on_in_another_group_can_be_handed_over() -> None:
    """What is held stays, and the model is as it was before the step: for a member that joins meanwhile."""
    config = settings(shards=SHARDS)
    module = seeded(Model)
    before = state_hash(module)
    with DistributedContext(1, 0) as context:
        transaction = StepTransaction(Team(context, SHARDS), module, config, torch.device("cpu"))
        transaction.open(0, 0, COUNTS)
        for shard in (0, 1):
            compute(transaction, module, shard)
        assert state_hash(module) != before  # batch normalisation counts
        transaction.rebind()
        assert transaction.held == (0, 1)
        assert state_hash(module) == before
        for shard in (2, 3):
            compute(transaction, module, shard)
        transaction.reduce()
        again = copy.deepcopy(seeded(Model))
        undisturbed = StepTransaction(Team(context, SHARDS), again, config, torch.device("cpu"))
        undisturbed.open(0, 0, COUNTS)
        for shard in range(SHARDS):
            compute(undisturbed, again, shard)
        undisturbed.reduce()
        assert state_hash(module) == state_hash(again)
        assert all(map(torch.equal, gradients(module), gradients(again)))


def test_a_shard_that_could_not_be_deposited_is_not_held() -> None:
    """In a group that is over there is no memory for it: it is computed again."""
    config = settings(shards=SHARDS)

    def rank(context: DistributedContext) -> tuple[int, ...]:
        module = seeded(Model)
        transaction = StepTransaction(Team(context, SHARDS), module, config, torch.device("cpu"))
        transaction.open(0, 0, COUNTS)
        context.interrupt("a member was lost")
        with pytest.raises(GroupInterruptedError):
            compute(transaction, module, transaction.missing[0])
        return transaction.held

    assert run_ranks(2, rank) == [(), ()]


def test_a_run_leaves_nothing_even_without_the_collector(tmp_path: Path) -> None:
    """Memory that gradients were exchanged in goes with the run, not some time later."""
    given = job(mlp(), (X, Y), epochs=1, run_dir=tmp_path / "run", validation=(X, Y))
    train(given, 2)  # what is started once and kept
    before = leaks.snapshot()
    gc.disable()
    try:
        outcome = train(given, 2)
        now = leaks.snapshot()
    finally:
        gc.enable()
    assert now.descriptors == before.descriptors
    assert now.threads == before.threads
    assert all(parameter.grad is None for parameter in outcome.module.parameters())


def test_what_all_ranks_know_after_a_step() -> None:
    model = seeded(Model)
    config = settings(shards=SHARDS, workers=3)

    def one(context: DistributedContext) -> tuple[int, int, int, int, tuple[str, ...], list[float]]:
        module = copy.deepcopy(model)
        transaction = StepTransaction(Team(context, config.shards), module, config, torch.device("cpu"))
        transaction.open(0, 0, COUNTS)
        for shard in transaction.missing:
            compute(transaction, module, shard)
        requests = StepRequests(
            stop=context.rank == 1, part_written=context.rank != 0, part_failed=context.rank == 0
        )
        known = transaction.reduce(requests)
        numbers = known.numbers.tolist()
        return known.applied, known.stops, known.parts_written, known.parts_failed, known.unused, numbers

    found = run_ranks(3, one)
    assert all(known == found[0] for known in found)
    assert found[0][:5] == (12, 1, 2, 1, ())


def test_sparse_gradients_and_samples_that_were_left_out() -> None:
    module: Any = seeded(Model)
    plain: Any = copy.deepcopy(module)
    with DistributedContext(1, 0) as context:
        transaction = StepTransaction(Team(context, 2), module, settings(shards=2), torch.device("cpu"))
        transaction.open(0, 0, [6, 6])
        for shard in transaction.missing:
            transaction.start_shard(shard)
            if shard == 0:
                transaction.backward(F.mse_loss(module(X[:6]), Y[:6]), 6)
            else:
                transaction.leave_out(6)
            transaction.finish_shard(shard)
        reduced = transaction.reduce()
    F.mse_loss(plain(X[:6]), Y[:6]).backward()
    assert reduced.applied == 6
    for mine, theirs in zip(gradients(module), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(module.inner[1].running_mean, plain.inner[1].running_mean)


class Wide(nn.Module):
    """Too large for the slots of small messages."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 100_000)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[:, :2]


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
def test_any_deal_of_the_shards_gives_the_same_bits(checksums: bool) -> None:
    """Also where some compute nothing, and where the shards do not follow the ranks, as after a repair."""
    config = settings(shards=SHARDS)
    model = seeded(Wide)

    def step(team: Team, module: nn.Module) -> str:
        transaction = StepTransaction(
            team, module, config, torch.device("cpu"), checks=GradientChecks(checksums=checksums)
        )
        transaction.open(0, 0, COUNTS)
        for shard in transaction.missing:
            compute(transaction, module, shard)
        transaction.reduce()
        return sha(torch.cat([gradient.flatten() for gradient in gradients(module)]))

    def one(context: DistributedContext) -> list[str]:
        module, team = copy.deepcopy(model), Team(context, SHARDS)
        found = []
        for owners in product(range(3), repeat=SHARDS):
            team.install(context, [[s for s in range(SHARDS) if owners[s] == rank] for rank in range(3)])
            found.append(step(team, module))
        return found

    with DistributedContext(1, 0) as context:
        alone = step(Team(context, SHARDS), copy.deepcopy(model))
    assert run_ranks(3, one) == [[alone] * 3**SHARDS] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sum_that_lacks_samples_is_not_applied(ranks: int) -> None:
    """Whatever lost them: no rank goes on with it, and the step can be done again."""
    model = seeded(Model)

    def one(context: DistributedContext) -> tuple[str, bool]:
        module = copy.deepcopy(model)
        team = Team(context, SHARDS)
        transaction = StepTransaction(team, module, settings(shards=SHARDS), torch.device("cpu"))
        transaction.open(0, 0, COUNTS)
        for shard in transaction.missing:
            if shard == 1:
                transaction.start_shard(shard)
                transaction.finish_shard(shard)
            else:
                compute(transaction, module, shard)
        with pytest.raises(InternalError, match="has 12 samples, and the sum of all shards holds 9") as found:
            transaction.reduce()
        transaction.abandon()
        transaction.open(0, 0, COUNTS)
        for shard in transaction.missing:
            compute(transaction, module, shard)
        return found.value.remedy, transaction.reduce().applied == 12

    for remedy, done_again in run_ranks(ranks, one):
        assert "journal" in remedy
        assert done_again


@pytest.mark.parametrize("given", [{}, {"compression": GradientCompression(kind="int8")}])
def test_a_rank_without_shards_is_heard_as_well(given: dict[str, Any]) -> None:
    """It has no sum for its wishes, and the sample of its weights, to travel with."""
    config = settings(shards=2, workers=3, **given)
    model = seeded(Model)

    def one(context: DistributedContext) -> tuple[int, int, int]:
        module, team = copy.deepcopy(model), Team(context, 2)
        transaction = StepTransaction(team, module, config, torch.device("cpu"))
        transaction.open(0, 0, [3, 3])
        for shard in transaction.missing:
            compute(transaction, module, shard)
        known = transaction.reduce(StepRequests(stop=not team.block, part_written=True, sample=12345))
        return known.applied, known.stops, known.parts_written

    assert run_ranks(3, one) == [(6, 1, 3)] * 3
