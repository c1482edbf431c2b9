"""Steps whose shards are computed together: `nn.SyncBatchNorm` has the statistics of the global batch, with
the same bits for any number of ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.running import handlers_as_before, job, regression, seeded, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.comm.context import DistributedContext
from paceline.core.errors import PeerError, UsageError
from paceline.train.callbacks import Modifier
from paceline.train.loop import worker_jobs
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.step import lockstep
from paceline.train.step.lockstep_limits import needs_lockstep

# 29 samples in batches of 12 over 6 shards: in the last step of an epoch a shard is empty, others hold one.
DATA = regression(29)
RANKS = (1, 2, 3, 4, 6)


class Woven(nn.Module):
    """Adds up several ways, of which some wait for other shards; how many nodes a pass has depends on its
    samples. In which order autograd adds the gradients of a tensor then decides the last bits."""

    def __init__(self, kind: Any = nn.SyncBatchNorm) -> None:
        super().__init__()
        self.first, self.beside, self.inner = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.deeper = kind(8), kind(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        start = self._longer(self.first(x), x[0, 0])
        beside, waves = torch.tanh(self.beside(start)), torch.cos(start)
        inner = self._longer(F.relu(self.norm(start), inplace=True), x[0, 1])
        deeper = self.deeper(self.inner(inner) + start)
        return self.last(inner + deeper + beside * start * waves)

    def _longer(self, value: Tensor, by: Tensor) -> Tensor:
        for _ in range(int(by.abs() * 10)):
            value = value + 0.01 * torch.sin(value)
        return value


class Tied(nn.Module):
    """One weight before and behind the layer: under autocast it is cast once or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.last = nn.Linear(5, 5), nn.SyncBatchNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.inner(self.norm(self.inner(x))))


def images() -> tuple[Tensor, Tensor]:
    x, y = regression(29, 3 * 6 * 6)
    return x.reshape(29, 3, 6, 6), y


def conv(kind: Any = nn.SyncBatchNorm) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), kind(4), nn.ReLU(), nn.Conv2d(4, 4, 3), kind(4, momentum=None), nn.Flatten(),
        nn.Linear(16, 2),
    )  # fmt: skip


def plain(**given: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.SyncBatchNorm(8, **given), nn.Tanh(), nn.Linear(8, 2))


def frozen() -> nn.Module:
    model = plain()
    for parameter in model[:2].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    return model


def both_kinds() -> nn.Module:
    """Buffers of a layer that stays within its shard move by the average, as in any other run."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.Linear(8, 2))


class Chosen(nn.Module):
    """Normalises some of its samples, of some shards none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.SyncBatchNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        out, chosen = self.first(x), x[:, 0] > 0.3
        return self.last(out.masked_scatter(chosen[:, None], self.norm(out[chosen])))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "woven": (Woven, {}),
    "convolutions": (conv, {"data": images}),
    "no affine, no running": (lambda: plain(affine=False, track_running_stats=False), {}),
    "frozen": (frozen, {}),
    "double": (lambda: plain().double(), {"data": lambda: tuple(one.double() for one in DATA)}),
    "bf16, tied": (Tied, {"precision": "bf16"}),
    "both kinds": (both_kinds, {"drop_last": True, "global_batch": 14}),
    "converted": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Woven(nn.BatchNorm1d)), {}),
    "some samples": (Chosen, {"drop_last": True}),
    "recurrent": (lambda: Recurrent(), {}),
}


class Recurrent(nn.Module):
    """torch keeps the weights of an LSTM in a second place, and knows when they are others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.SyncBatchNorm(5), nn.LSTM(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.inner(self.norm(x)[None])[0][0])


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_ranks_changes_no_bit(name: str) -> None:
    make, given = MODELS[name]
    given = {**given}
    data = given.pop("data", lambda: DATA)()
    made = job(seeded(make), data, epochs=2, **given)
    found = [train(made, ranks) for ranks in (RANKS if name == "woven" else (1, 2, 3))]
    assert len({one.hash for one in found}) == 1
    assert len({tuple(one.losses) for one in found}) == 1
    states = [state for one in found for module in one.modules for state in [module.state_dict()]]
    assert all(torch.equal(state[key], states[0][key]) for state in states for key in state)


def test_autograd_would_add_up_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bits of `Woven` depend on, without the alignment of its nodes."""
    monkeypatch.setattr(lockstep, "align", lambda number: number)
    made = job(seeded(Woven), DATA, epochs=2)
    assert train(made, 1).hash != train(made, 6).hash


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_batch_norm_over_the_global_batch(ranks: int) -> None:
    # Slices hold different numbers of samples, the last step of an epoch one each.
    together = train(job(seeded(conv), images(), epochs=3, shards=5), ranks)
    whole = train(job(seeded(lambda: conv(nn.BatchNorm2d)), images(), epochs=3, shards=1))
    assert together.losses == pytest.approx(whole.losses, rel=1e-5)
    expected = whole.module.state_dict()
    for name, value in together.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_in_fast_mode_it_follows_the_workers() -> None:
    made = job(seeded(plain), DATA, epochs=1, mode="fast", shards=None)
    two = [train(made, 2) for _ in range(2)]
    assert two[0].losses == two[1].losses
    assert two[0].losses == pytest.approx(train(made, 3).losses, rel=1e-5)


class Skips(nn.Module):
    def __init__(self, within: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.SyncBatchNorm(8), nn.Linear(8, 2)
        self.within = within

    def forward(self, x: Tensor) -> Any:
        out = self.first(x)
        # Whether the two shards of a rank differ, or two ranks.
        skip = bool((x == DATA[0][:1]).all(1).any()) if self.within else bool(x.shape[0] == 1)
        return self.last(out if skip else self.norm(out))


@pytest.mark.parametrize(("within", "ranks"), [(True, 1), (True, 6), (False, 6)])
def test_shards_that_call_other_layers_are_named(within: bool, ranks: int) -> None:
    made = job(seeded(lambda: Skips(within)), DATA, epochs=1, global_batch=11 if not within else 12)
    with pytest.raises((UsageError, PeerError)) as caught:
        train(made, ranks)
    text = str(caught.value)
    assert "at 'norm' with 8 channels" in text
    assert "at the end of the forward pass" in text


class Rechecks(Skips):
    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(lambda y: self.norm(self.first(y)), x, use_reentrant=False))


class Penalised(Skips):
    def forward(self, x: Tensor) -> Any:
        out = self.norm(self.first(x.requires_grad_()))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return self.last(out) + slope.sum()


class Hidden(Skips):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(F.linear(x, self.__dict__["_kept"][0])))


def hidden() -> nn.Module:
    model = Hidden(False)
    model.__dict__["_kept"] = [model.first.weight]
    return model


class Backwards(Skips):
    def forward(self, x: Tensor) -> Any:
        self.last(x.new_ones(1, 8)).sum().backward()
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Rechecks(False), "not by a shard's forward pass"),
        (lambda: Penalised(False), "a gradient through the SyncBatchNorm 'norm' was asked for"),
        (hidden, "the gradient of first.weight did not reach the shard"),
        (lambda: Backwards(False), "has gradients before the run's own backward"),
    ],
)
def test_what_cannot_wait_for_the_others_is_refused(make: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        train(job(seeded(make), DATA, epochs=1))


def test_one_sample_has_no_variance() -> None:
    made = job(seeded(plain), regression(13), epochs=1)
    with pytest.raises(UsageError, match="'1' got one value per channel") as caught:
        train(made)
    assert "drop_last=True" in caught.value.remedy


def test_an_error_in_a_shard_says_where() -> None:
    class Breaks(Skips):
        def forward(self, x: Tensor) -> Any:
            out = self.norm(self.first(x))
            if x.shape[0] == 1:
                raise ValueError("one sample")
            return self.last(out)

    with pytest.raises(ValueError, match="one sample") as caught:
        train(job(seeded(lambda: Breaks(False)), DATA, epochs=1))
    assert "shard" in "".join(caught.value.__notes__)


def test_a_model_can_be_copied_and_pickled_in_a_run() -> None:
    class Copies(Modifier):
        def change_gradients(self, parameters: Any) -> None:
            pass

        def after_update(self, parameters: Any, step: Any) -> None:
            for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert made(torch.randn(4, 5)).shape == (4, 2)

    model = seeded(plain)
    with handlers_as_before(), DistributedContext(1, 0) as context:
        worker_jobs.train(context, job(model, DATA, max_steps=2, epochs=None, callbacks=[Copies()]))
    assert "forward" not in vars(model[1])  # type: ignore[index]
    assert torch.equal(model.eval()(DATA[0]), copy.deepcopy(model)(DATA[0]))


class Own(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input) + 1.0


@pytest.mark.parametrize(
    ("make", "given", "what"),
    [
        (plain, {"micro_batch": 1}, "in micro-batches of 1, each by itself"),
        (plain, {"fault_tolerance": FaultTolerance(stragglers="backup")}, 'stragglers="backup"'),
        (plain, {"activation_checkpointing": ("SyncBatchNorm",)}, "computes SyncBatchNorm again"),
        (lambda: plain(process_group="some"), {}, "was given a process_group"),
        (lambda: nn.Sequential(nn.Linear(5, 8), Own(8), nn.Linear(8, 2)), {}, "Own has a forward of its own"),
    ],
)
def test_what_does_not_go_with_it(make: Any, given: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        train(job(seeded(make), DATA, epochs=1, **given))
    assert caught.value.remedy


def test_a_compiled_model_cannot_wait() -> None:
    with pytest.raises(UsageError, match="compile=True"):
        needs_lockstep(plain(), job(plain, DATA, compile=True).config, own_loop=False)


def test_a_micro_batch_as_large_as_a_shard_cuts_nothing() -> None:
    hashes = [train(job(seeded(plain), DATA, epochs=1, micro_batch=cut)).hash for cut in (None, 2)]
    assert hashes[0] == hashes[1]
