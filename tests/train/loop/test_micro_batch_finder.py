"""The largest micro-batch that fits: the search itself, what counts as out of memory, and no trace left."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from paceline.core.errors import ConfigError, ResourceError
from paceline.data.sources import as_source
from paceline.train.loop.micro_batch_finder import find, find_for_run, is_out_of_memory, largest_size
from paceline.train.objective import Objective
from paceline.train.settings.train_config import DynamicBatch, TrainConfig

CPU = torch.device("cpu")


def limited(limit: int, tried: list[int] | None = None):
    def try_size(size: int) -> None:
        if tried is not None:
            tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError(f"no room for {size}")

    return try_size


@pytest.fixture
def quick(monkeypatch) -> None:
    """Nothing is really full, so nothing needs to be emptied."""
    monkeypatch.setattr("paceline.train.loop.micro_batch_finder._empty_caches", lambda device: None)


@pytest.mark.usefixtures("quick")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(largest=st.integers(1, 5000), limit=st.integers(1, 6000))
def test_the_largest_that_fits_is_found(largest, limit):
    tried: list[int] = []
    assert find(limited(limit, tried), largest) == min(largest, limit)
    assert len(tried) <= 2 * largest.bit_length() + 2
    assert len(set(tried)) == len(tried)


def test_what_is_tried():
    tried: list[int] = []
    assert find(limited(100, tried), 24) == 24
    assert tried == [2, 4, 8, 16, 24]
    tried.clear()
    assert find(limited(1, tried), 24) == 1
    assert tried == [2, 1]
    tried.clear()
    assert find(limited(6, tried), 24) == 6
    assert tried == [2, 4, 8, 6, 7]


def test_one_sample_that_does_not_fit():
    with pytest.raises(ResourceError, match="not even one sample") as caught:
        find(limited(0), 8)
    assert "activation_checkpointing" in caught.value.remedy


def test_other_errors_come_out_with_a_note():
    def try_size(size: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes") as caught:
        find(try_size, 8)
    assert caught.value.__notes__ == ['while micro_batch="auto" tried a micro-batch of 2']


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def test_what_torch_says_on_a_cpu_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


class Data:
    """Reading draws random numbers, as augmentation does."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), index + random.random() + np.random.rand()), torch.zeros(2)


def numpy_state() -> Any:
    state: Any = np.random.get_state()
    return state[1].copy()


def test_a_run_is_as_before_the_trials():
    model = Net()
    model.body[2].eval()
    model.body[0].weight.grad = torch.ones(8, 4)
    limit = 5
    seen: list[int] = []

    def objective(net, batch):
        seen.append(len(batch[0]))
        random.random()
        np.random.rand()
        net.train()
        loss = (net(batch[0]) - batch[1]).square().mean()
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("full")
        return loss

    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), numpy_state()
    config = TrainConfig(workers=2, shards=2, global_batch=40, seed=3)
    found = find_for_run(config, model, model, Objective(objective), as_source(Data()), CPU)
    assert found == limit
    assert seen == [2, 4, 8, 6, 5]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(numpy_state(), generators[2])
    assert model.training
    assert not model.body[2].training
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(gradients) == ["body.0.weight"]
    assert torch.equal(gradients["body.0.weight"], torch.ones(8, 4))


def test_the_batch_is_changed_as_in_the_run():
    sizes: list[int] = []

    def objective(net, batch):
        sizes.append(len(batch[0]))
        return net(batch[0]).sum()

    config = TrainConfig(workers=1, shards=1, global_batch=4)
    data = as_source((torch.randn(9, 4), torch.randn(9, 2)))
    net = nn.Linear(4, 2)

    def twice(batch):
        return tuple(torch.cat([part, part]) for part in batch)

    assert find_for_run(config, net, net, Objective(objective), data, CPU, twice) == 4
    assert sizes == [4, 8]


def test_the_largest_is_a_shard_and_never_more_than_there_is():
    data = as_source(torch.randn(100, 2))
    assert largest_size(TrainConfig(workers=4, shards=4, global_batch=30), data) == 8
    assert largest_size(TrainConfig(workers=1, shards=1, global_batch=512), data) == 100
    dynamic = TrainConfig(workers=2, shards=2, dynamic_batch=DynamicBatch(8, 64))
    assert largest_size(dynamic, data) == 32
    with pytest.raises(ConfigError, match="iterable dataset") as caught:
        largest_size(TrainConfig(), as_source(lambda: iter([torch.zeros(2)])))
    assert "micro_batch" in caught.value.remedy


@pytest.mark.cuda
@pytest.mark.leaky("CUDA keeps its descriptors until the process ends")
def test_a_real_gpu_with_little_memory():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    used = torch.cuda.memory_reserved(device)
    # Room for about half of the batch: each sample keeps 16 MiB of activations for the backward pass.
    torch.cuda.set_per_process_memory_fraction((used + (1 << 30)) / total, device)
    try:
        width = 1 << 20
        net = nn.Linear(4, 2).to(device)

        def objective(model, batch):
            wide = batch[0].sum(1, keepdim=True).expand(-1, width) * 1.0
            for _ in range(3):
                wide = wide.sin()
            return wide.mean() + model(batch[0]).mean()

        data = as_source((torch.randn(256, 4), torch.randn(256, 2)))
        config = TrainConfig(workers=1, shards=1, global_batch=256, device="cuda")
        found = find_for_run(config, net, net, Objective(objective), data, device)
        assert 8 <= found < 256
        before = torch.cuda.memory_allocated(device)
        objective(net, [torch.randn(found, 4, device=device)]).backward()
        torch.cuda.synchronize(device)
        with pytest.raises(torch.OutOfMemoryError):
            objective(net, [torch.randn(2 * found, 4, device=device)]).backward()
        assert before < 1 << 27
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
