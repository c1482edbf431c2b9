"""Parameters and buffers of every kind: frozen, unused, shared, sparse, of other dtypes and layouts."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.train.running import hashes, job, mlp, regression, seeded, train
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.train.callbacks import Modifier
from paceline.train.loop import worker_jobs

DATA = regression(29)


class Partly(nn.Module):
    """One branch is frozen, one is never used, one only by some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(5, 2)
        self.frozen = nn.Linear(5, 2).requires_grad_(False)
        self.never = nn.Linear(5, 2)
        self.rare = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> Any:
        total = self.main(x) + self.frozen(x)
        if bool((x[:, 0] > 1.0).any()):
            total = total + self.rare(x)
        return total


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.5)


@pytest.mark.parametrize("workers", [1, 2])
def test_frozen_and_unused_parameters_keep_their_values(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = seeded(Partly)
    frozen, never = model.frozen.weight.clone(), model.never.weight.clone()
    with caplog.at_level(logging.WARNING):
        ours: Any = train(job(model, DATA, optimizer=adamw, epochs=2), workers).module
    assert torch.equal(ours.frozen.weight, frozen)
    assert torch.equal(ours.never.weight, never), "not even weight decay moves it"
    assert not torch.equal(ours.main.weight, model.main.weight)
    said = [record.getMessage() for record in caplog.records if "no gradient" in record.getMessage()]
    assert len(said) == 1
    assert "never.weight, never.bias" in said[0]
    assert "frozen" not in said[0]
    assert "main" not in said[0]


def test_a_parameter_that_few_shards_use() -> None:
    """Where one shard uses it, all workers see its gradient; where none does, no worker touches it."""
    assert len(set(hashes(job(seeded(Partly), DATA, optimizer=adamw, epochs=2)))) == 1


def test_a_frozen_parameter_may_be_given_to_the_optimizer() -> None:
    model: Any = seeded(Partly)
    kept = model.frozen.weight.clone()
    given = job(model, DATA, epochs=1)
    given = dataclasses.replace(given, optimizer=adamw(model.parameters()))
    with DistributedContext(1, 0) as context:
        assert worker_jobs.train(context, given).history is not None
    assert torch.equal(model.frozen.weight, kept)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


def test_tied_weights_stay_tied() -> None:
    given = job(seeded(Tied), (DATA[0], DATA[0]), epochs=2)
    ours: Any = train(given, 2).module
    assert ours.first.weight is ours.second.weight
    assert len(set(hashes(given))) == 1


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.bag = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embedding(x).mean(1) + self.bag(x))


def two_optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    sparse = [p for name, p in parameters.named.items() if not name.startswith("head")]
    dense = [p for name, p in parameters.named.items() if name.startswith("head")]
    return [torch.optim.SparseAdam(sparse, 0.05), torch.optim.Adam(dense, 0.02)]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_sparse_embeddings_with_an_optimizer_of_their_own(clip: float | None) -> None:
    words = torch.randint(0, 15, (29, 3), generator=torch.Generator().manual_seed(0))
    data = (words, DATA[1])
    given = job(seeded(Words), data, optimizer=two_optimizers, epochs=2, clip_norm=clip)
    assert len(set(hashes(given))) == 1
    before: Any = given.model
    ours: Any = train(given, 2).module
    untouched = ~torch.isin(torch.arange(20), words)
    assert torch.equal(ours.embedding.weight[untouched], before.embedding.weight[untouched])
    assert not torch.equal(ours.embedding.weight, before.embedding.weight)


def test_sparse_gradients_are_those_of_a_plain_loop() -> None:
    words = torch.randint(0, 20, (12, 3), generator=torch.Generator().manual_seed(0))
    target = torch.zeros(12, 2)
    plain: Any = seeded(Words)
    given = job(
        seeded(Words), (words, target), optimizer=two_optimizers, shards=3, shuffle=False, max_steps=1
    )
    ours: Any = train(given, 3).module
    optimizers = two_optimizers(type("P", (), {"named": dict(plain.named_parameters())})())
    F.mse_loss(plain(words), target).backward()
    for optimizer in optimizers:
        optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_groups_by_name() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        bias = [p for name, p in parameters.named.items() if name.endswith("bias")]
        rest = [p for name, p in parameters.named.items() if not name.endswith("bias")]
        return torch.optim.SGD([{"params": rest, "lr": 0.1}, {"params": bias, "lr": 0.0}], weight_decay=0.1)

    model: Any = mlp()
    ours: Any = train(job(model, DATA, optimizer=groups, epochs=1), 2).module
    assert torch.equal(ours[0].bias, model[0].bias)
    assert not torch.equal(ours[0].weight, model[0].weight)


def test_optimizers_that_cannot_work_are_refused() -> None:
    model, other = mlp(), mlp()
    with pytest.raises(UsageError, match=r"LBFGS cannot be used: it computes the loss several times"):
        train(job(model, DATA, optimizer=lambda p: torch.optim.LBFGS(p)))
    with pytest.raises(UsageError, match=r"no optimizer holds 2.weight, 2.bias"):
        train(job(model, DATA, optimizer=lambda p: torch.optim.SGD(p[:2], 0.1)))
    with pytest.raises(UsageError, match=r"0.weight is in two optimizers"):
        train(job(model, DATA, optimizer=lambda p: [torch.optim.SGD(p, 0.1), torch.optim.SGD([p[0]], 0.1)]))
    with pytest.raises(UsageError, match="not one of the model's"):
        train(job(model, DATA, optimizer=lambda p: torch.optim.SGD([*p, *other.parameters()], 0.1)))
    stranger = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(UsageError, match="not one of the model's"):
        train(job(model, DATA, optimizer=lambda p: torch.optim.SGD([*p, stranger], 0.1)))
    with pytest.raises(UsageError, match="the optimizer factory returned a str"):
        train(job(model, DATA, optimizer=lambda p: ["adam"]))
    with pytest.raises(UsageError, match="no parameter that is trained"):
        train(job(mlp().requires_grad_(False), DATA))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accurate = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.rough = nn.Parameter(torch.randn(4, 4).bfloat16())
        self.phase = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(4, 2).t())

    def forward(self, x: Tensor) -> Any:
        hidden = (x.double() @ self.accurate).float()
        hidden = (hidden.bfloat16() @ self.rough).float()
        turned = (hidden.to(torch.complex64) @ self.phase).abs() + (hidden @ self.strided.t())
        return turned + self.wide.abs().float() + self.nothing.sum()


def test_other_dtypes() -> None:
    given = job(
        seeded(Mixed),
        DATA,
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        epochs=3,
        clip_norm=1.0,
    )
    outcomes = [train(given, workers) for workers in (1, 2, 3, 4)]
    assert len({outcome.hash for outcome in outcomes}) == 1
    first = outcomes[0]
    assert first.losses[-1] < first.losses[0]
    before = dict(given.model.named_parameters())  # type: ignore[union-attr]
    for name, parameter in first.module.named_parameters():
        assert parameter.dtype == before[name].dtype
        assert name == "nothing" or not torch.equal(parameter, before[name])


def test_gradients_of_doubles_are_summed_in_doubles() -> None:
    x, y = DATA[0].double(), DATA[1].double()
    plain = mlp().double()
    given = job(mlp().double(), (x, y), shards=4, global_batch=29, max_steps=1)
    ours = train(given, 2).module
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    F.mse_loss(plain(x), y).backward()
    optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-15)


class SameStrides(Modifier):
    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for parameter in parameters.values():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()


def test_channels_last() -> None:
    images = torch.randn(29, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    model: Any = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    )
    model.to(memory_format=torch.channels_last)
    given = job(model, (images, DATA[1]), epochs=2, callbacks=[SameStrides()])
    assert len(set(hashes(given))) == 1
    ours: Any = train(given, 2).module
    assert ours[0].weight.is_contiguous(memory_format=torch.channels_last)


class Statistics(nn.Module):
    """Buffers that models really have: lowest and highest, counters, flags, hashes, doubles, complex ones."""

    lowest: Tensor
    highest: Tensor
    untouched: Tensor
    seen: Tensor
    large: Tensor
    ready: Tensor
    mean: Tensor
    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.register_buffer("lowest", torch.full((5,), math.inf))
        self.register_buffer("highest", torch.full((5,), -math.inf))
        self.register_buffer("untouched", torch.tensor([math.inf, -0.0, math.nan, 1.5, -math.inf]))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("large", torch.tensor([1 << 60, -7]))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64), persistent=False)
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.lowest.copy_(torch.minimum(self.lowest, x.amin(0)))
            self.highest = torch.maximum(self.highest, x.amax(0))
            self.seen += 1
            self.large += (1 << 41) + 1
            self.ready.fill_(True)
            self.mean += x.double().mean(0) / 3
            self.turn += torch.complex(x[:, 0].mean(), x[:, 1].mean())
        return self.linear(x)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shards", [1, 5])
def test_buffers_of_every_kind(shards: int) -> None:
    x, y = DATA
    given = job(seeded(Statistics), (x, y), shards=shards, global_batch=10, max_steps=2, shuffle=False)
    counts = [count for count in (1, 2, 3, 5) if count <= shards]
    outcomes = [train(given, count) for count in counts]
    assert len({outcome.hash for outcome in outcomes}) == 1
    ours: Any = outcomes[0].module
    untouched: Any = given.model
    assert bits(ours.untouched) == bits(untouched.untouched)
    assert int(ours.seen) == 2
    assert ours.large.tolist() == [(1 << 60) + 2 * ((1 << 41) + 1), -7 + 2 * ((1 << 41) + 1)]
    assert bool(ours.ready)
    parts = x[:20].view(2, shards, 10 // shards, 5)
    torch.testing.assert_close(ours.mean, parts.double().mean(2).mean(1).sum(0) / 3, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.turn.real, parts[..., 0].mean(2).mean(1).sum(0).expand(2))
    # Every shard moves from the same start, so these are averages over the shards of what they saw.
    first = parts[0].amin(1).mean(0)
    torch.testing.assert_close(ours.lowest, torch.minimum(first, parts[1].amin(1)).mean(0))
    assert ours.highest.isfinite().all()


class Zeros(nn.Module):
    lowest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.register_buffer("lowest", torch.tensor(math.inf))

    def forward(self, x: Tensor) -> Any:
        self.lowest.clamp_(max=0.0)
        return self.linear(x)


def test_a_buffer_that_moves_from_infinity_to_zero() -> None:
    ours: Any = train(job(seeded(Zeros), DATA, epochs=1), 2).module
    assert bits(ours.lowest.reshape(1)) == bits(torch.zeros(1))


def test_batch_norm_counts_steps() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    given = job(model, DATA, shards=4, global_batch=16, epochs=3, drop_last=True)
    ours: Any = train(given, 2).module
    assert int(ours[1].num_batches_tracked) == 3
