"""Scopes for loops of the user's own: the same bits, and less that autograd keeps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline

Scope = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        change: Tensor = self.drop(torch.tanh(self.inner(self.norm(x))))
        return x + scale * change


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Written(nn.Module):
    """Layers as attributes, functions between them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            setattr(self, f"layer{number}", nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(8):
            x = torch.relu(getattr(self, f"layer{number}")(x))
        return x


class Headed(nn.Module):
    """Layers in a list and functions between them, as `Written`; a Sequential that is a small part of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: Tensor = self.head(x)
        return result


class Mixed(nn.Module):
    """As many layers in a Sequential as outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), Written()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def flat() -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(32, 32), nn.ReLU())))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "flat": flat,
    "blocks": lambda: nn.Sequential(*(Block() for _ in range(8))),
    "listed": Listed,
    "written": Written,
    "headed": Headed,
    "mixed": Mixed,
    "nested": lambda: nn.Sequential(flat(), Listed(), nn.Linear(32, 3)),
    "alone": lambda: nn.Linear(32, 32),
}


def trained(model: nn.Module, scope: Scope, *, backward_inside: bool) -> list[Tensor]:
    """Two steps; the gradients, the buffers and the loss after them."""
    torch.manual_seed(1)
    x = torch.randn(64, 32)
    for _ in range(2):
        with scope():
            loss = model(x).square().mean()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [one for one in (*grads, *model.buffers(), loss.detach()) if one is not None]


def kept(model: nn.Module, x: Tensor, scope: Scope) -> int:
    """Bytes that autograd keeps from forward to backward, without parameters and the batch itself. Inputs
    of what is recomputed are among them: torch saves them like any other."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), scope():
        loss = model(x).square().mean()
    loss.backward()
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), x)}
    return sum(size for pointer, size in held.items() if pointer not in own)


@pytest.mark.parametrize("backward_inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name, backward_inside):
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = trained(copy.deepcopy(model), nullcontext, backward_inside=backward_inside)
    for scope in (
        paceline.checkpoint_scope,
        paceline.gradient_checkpointing.checkpoint_scope,
        paceline.memory_pool_scope,
    ):
        found = trained(copy.deepcopy(model), scope, backward_inside=backward_inside)
        assert len(found) == len(plain)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "alone"])
def test_autograd_keeps_at_most_half(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(512, 32)
    without, within = kept(model, x, nullcontext), kept(model, x, paceline.checkpoint_scope)
    assert within <= without / 2
    assert without >= 8 * 512 * 32 * 4


def test_classes_by_name():
    model, x = MODELS["nested"](), torch.randn(512, 32)
    torch.manual_seed(0)
    without, within = (
        kept(model, x, nullcontext),
        kept(model, x, lambda: paceline.checkpoint_scope(["Block"])),
    )
    assert within < without
    with pytest.raises(paceline.UsageError, match="names Blok, which Sequential does not contain"):
        kept(model, x, lambda: paceline.checkpoint_scope(["Blok"]))
    with pytest.raises(paceline.UsageError, match="names of classes"), paceline.checkpoint_scope("Block"):
        pass


def test_other_threads_and_the_time_after_are_as_before():
    before = nn.Module.__call__
    model, x, found = flat(), torch.randn(16, 32), list[int]()

    def measure() -> None:
        found.append(kept(model, x, nullcontext))

    with paceline.checkpoint_scope():
        with paceline.checkpoint_scope():
            pass
        other = threading.Thread(target=measure)
        other.start()
        other.join()
        assert kept(model, x, nullcontext) < found[0]
        with torch.no_grad():
            assert not model(x).requires_grad
    assert nn.Module.__call__ is before
    assert kept(model, x, nullcontext) == found[0]


def test_hooks_of_the_user_are_called_once_per_pass():
    model, called = flat(), list[str]()
    model.register_forward_hook(lambda *_: called.append("model"))
    model[0].register_forward_hook(lambda *_: called.append("layer"))
    with paceline.checkpoint_scope():
        loss = model(torch.randn(4, 32)).sum()
    assert called == ["layer", "model"]
    loss.backward()


def test_an_error_in_the_model_leaves_nothing_behind():
    before = nn.Module.__call__
    model = flat()
    with pytest.raises(RuntimeError, match="shapes"), paceline.checkpoint_scope():
        model(torch.randn(4, 31))
    assert nn.Module.__call__ is before
    assert kept(model, torch.randn(8, 32), paceline.checkpoint_scope) > 0
