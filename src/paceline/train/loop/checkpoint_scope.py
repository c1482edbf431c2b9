"""`paceline.checkpoint_scope`: recompute activations in a loop of the user's own, in a `with` block.

    with paceline.checkpoint_scope():
        loss = criterion(model(x), y)
    loss.backward()

What autograd would keep between forward and backward is dropped and computed again: gradients are the same
bits. Inside the block, calls of modules by this thread are seen by `_seen_call`. The outermost call is
planned: the children of its Sequentials are run in about as many segments as the square root of their
number, modules of a ModuleList that have parts of their own one by one. A model with too few of its layers in
these is recomputed as a whole. For the models of a trainer there is
`TrainConfig(activation_checkpointing=...)`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import UsageError
from paceline.train.loop.process_setup import contexts_of_passes

_lock = threading.Lock()
_here = threading.local()  # `scope`: that of this thread; `plain`: inside of a module that is recomputed
_open_scopes = 0
_original: Callable[..., Any] = nn.Module.__call__
_LEAST_SHARE = 2 / 3  # of a model's layers to recompute: autograd keeps the activations of the others


@contextmanager
def checkpoint_scope(blocks: Sequence[str] = ()) -> Iterator[None]:
    """Recompute activations of the modules that this thread calls inside the block, for their backward.

    blocks   names of module classes to recompute one by one ("Block"); default: chosen, see the module
    """
    if isinstance(blocks, str) or not all(isinstance(name, str) for name in blocks):
        raise UsageError(
            f"checkpoint_scope was given {blocks!r}",
            remedy='give names of classes: checkpoint_scope(["Block"])',
        )
    before = getattr(_here, "scope", None)
    _count_scopes(+1)
    _here.scope = _Scope(frozenset(blocks))
    try:
        yield
    finally:
        _here.scope = before
        _count_scopes(-1)


def _count_scopes(change: int) -> None:
    """Look at calls of modules while some thread has a scope, and only then."""
    global _open_scopes, _original
    with _lock:
        if _open_scopes == 0:
            _original = nn.Module.__call__
            nn.Module.__call__ = _seen_call  # type: ignore[method-assign]
        _open_scopes += change
        if _open_scopes == 0:
            nn.Module.__call__ = _original  # type: ignore[method-assign]


def _seen_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    scope: _Scope | None = getattr(_here, "scope", None)
    if scope is None or getattr(_here, "plain", False) or not torch.is_grad_enabled():
        return _original(module, *args, **kwargs)
    return scope.call(module, args, kwargs)


@final
class _Scope:
    """One `with` block of one thread."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._plans: WeakKeyDictionary[nn.Module, frozenset[nn.Module]] = WeakKeyDictionary()
        self._chosen: frozenset[nn.Module] | None = None  # of the outermost call under way

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outermost = self._chosen is None
        if self._chosen is None:
            if module not in self._plans:
                self._plans[module] = _plan(module, self._names)
            self._chosen = self._plans[module]
        try:
            if module not in self._chosen:
                return _original(module, *args, **kwargs)
            if not kwargs and len(args) == 1 and _is_plain_sequential(module) and not self._names:
                return _in_segments(module, args[0])
            return _recomputed(module, *args, **kwargs)
        finally:
            if outermost:
                self._chosen = None


def _plan(module: nn.Module, names: frozenset[str]) -> frozenset[nn.Module]:
    """Choose the parts of a module to recompute: the outermost ones only."""
    if names:
        chosen = [part for part in module.modules() if type(part).__name__ in names]
        if not chosen:
            raise UsageError(
                f"checkpoint_scope names {', '.join(sorted(names))}, which "
                f"{type(module).__name__} does not contain",
                remedy=f"choose from {', '.join(sorted({type(part).__name__ for part in module.modules()}))}",
            )
    else:
        chosen = []
        for part in module.modules():
            if _is_plain_sequential(part):
                chosen.append(part)
            elif isinstance(part, nn.ModuleList):
                chosen += [child for child in part if next(child.children(), None) is not None]
        if sum(map(_layers, _outermost(chosen))) < _LEAST_SHARE * _layers(module):
            chosen = [module]
    return _outermost(chosen)


def _outermost(chosen: Sequence[nn.Module]) -> frozenset[nn.Module]:
    within = {inner for part in chosen for inner in part.modules() if inner is not part}
    return frozenset(part for part in chosen if part not in within)


def _layers(module: nn.Module) -> int:
    """Return the number of modules without parts."""
    return sum(next(part.children(), None) is None for part in module.modules())


def _is_plain_sequential(module: nn.Module) -> bool:
    """Whether running the children one after the other is all that a call of the module does."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return type(module) is nn.Sequential and not any(hooks) and len(module) > 0


def _in_segments(module: nn.Module, value: Any) -> Any:
    assert isinstance(module, nn.Sequential)
    size = math.ceil(len(module) / math.isqrt(len(module)))
    for start in range(0, len(module), size):
        value = _recomputed(module[start : start + size], value)
    return value


def _recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The default of torch: random generators and autocast are in the second pass as they were in the first.
    return checkpoint(
        partial(_plainly, module),
        *args,
        use_reentrant=False,
        context_fn=partial(contexts_of_passes, module),
        **kwargs,
    )


def _plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module in either pass: what lies within it is recomputed with it, and not by itself."""
    before = getattr(_here, "plain", False)
    _here.plain = True
    try:
        return _original(module, *args, **kwargs)
    finally:
        _here.plain = before
