"""Training here against loops written by hand with nothing but torch: bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.train.running import job, regression, seeded, train
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.reduction_order import Node, tree_fold
from paceline.data.batch_plan import split_evenly
from paceline.data.permutation import Permutation
from paceline.data.seeding import seed_everything

SAMPLES, BATCH, EPOCHS, SEED = 29, 12, 2, 5
X, Y = regression(SAMPLES)


def model() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2)
        )
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.02, weight_decay=0.1)


def steps() -> list[tuple[int, int, Tensor]]:
    """(epoch, step, sample numbers) of every step."""
    found: list[tuple[int, int, Tensor]] = []
    for epoch in range(EPOCHS):
        order = Permutation(SAMPLES, SEED, epoch).take(0, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            found.append((epoch, len(found), torch.from_numpy(order[start : start + BATCH].copy())))
    return found


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    mine, other = ours.state_dict(), theirs.state_dict()
    return all(torch.equal(mine[name], other[name]) for name in other) and mine.keys() == other.keys()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_one_shard_is_a_plain_loop(clip: float | None) -> None:
    plain = model()
    optimizer = adamw(plain.parameters())
    losses = []
    for epoch, step, ids in steps():
        seed_everything(SEED, epoch, step, 0)
        optimizer.zero_grad()
        loss = F.mse_loss(plain(X[ids]), Y[ids])
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
    ours = train(
        job(
            model(), (X, Y), optimizer=adamw, shards=1, global_batch=BATCH, epochs=EPOCHS, seed=SEED,
            clip_norm=clip,
        )
    )  # fmt: skip
    assert ours.losses == losses
    assert equal(ours.module, plain)


def test_one_shard_with_micro_batches_is_accumulation() -> None:
    plain = model()
    optimizer = adamw(plain.parameters())
    for epoch, step, ids in steps():
        seed_everything(SEED, epoch, step, 0)
        optimizer.zero_grad()
        for micro in ids.split(5):
            (F.mse_loss(plain(X[micro]), Y[micro]) * (len(micro) / len(ids))).backward()
        optimizer.step()
    ours = train(
        job(
            model(), (X, Y), optimizer=adamw, shards=1, global_batch=BATCH, epochs=EPOCHS, seed=SEED,
            micro_batch=5,
        )
    )  # fmt: skip
    assert equal(ours.module, plain)


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_shards_are_accumulation_along_the_tree(shards: int) -> None:
    """The gradient is the tree sum of the shards' weighted gradients."""
    plain = seeded(lambda: nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2)))
    ours = copy.deepcopy(plain)
    optimizer = adamw(plain.parameters())
    fold = tree_fold([Node(shard, 0) for shard in range(shards)], shards)
    for epoch, step, ids in steps():
        found: list[list[Tensor]] = []
        for shard, (start, stop) in enumerate(split_evenly(BATCH, shards)):
            mine = ids[start:stop]
            optimizer.zero_grad()
            if len(mine):
                seed_everything(SEED, epoch, step, shard)
                (F.mse_loss(plain(X[mine]), Y[mine]) * (len(mine) / len(ids))).backward()
            found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()])
        for position, parameter in enumerate(plain.parameters()):
            parts = [gradients[position].flatten() for gradients in found]
            total = torch.empty_like(parts[0])
            fold.run(torch.add, parts, total, [torch.empty_like(total) for _ in range(fold.temporaries)])
            parameter.grad = total.view_as(parameter)
        optimizer.step()
    trained = train(
        job(ours, (X, Y), optimizer=adamw, shards=shards, global_batch=BATCH, epochs=EPOCHS, seed=SEED)
    )
    assert equal(trained.module, plain)


def test_running_statistics_are_the_average_of_the_shards() -> None:
    """Weighted by samples; a shard without samples has no say, and the counter counts the step once."""
    norm = nn.BatchNorm1d(5, momentum=0.25)
    ours: Any = train(
        job(norm, (X[:5], torch.zeros(5, 5)), shards=4, global_batch=10, shuffle=False, max_steps=1)
    ).module
    mean = 0.25 * (X[0:2].mean(0) * 2 + X[2:5].mean(0) * 3) / 5
    var = 0.75 + 0.25 * (X[0:2].var(0) * 2 + X[2:5].var(0) * 3) / 5
    torch.testing.assert_close(ours.running_mean, mean)
    torch.testing.assert_close(ours.running_var, var)
    assert int(ours.num_batches_tracked) == 1
