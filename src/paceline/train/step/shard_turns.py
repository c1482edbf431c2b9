"""Forward passes of several shards on one rank that take turns: each stops where it has to meet the others.

A pass runs on a thread, and only between `resume` and its next `meet`: at any time one thread of a rank
computes. What belongs to the process or to the model and differs between shards (random generators, buffers,
the leaves that gradients go to) is exchanged when another shard's turn begins (`ShardModel`).

Autograd works off ready nodes by their sequence numbers, which torch counts by thread. Where the passes meet,
`align` brings the counters together, so that of all nodes of a backward pass over several shards those that
were made later come first. Without this, when the gradients of one shard are added up would depend on the
shards beside it, and the sum of three of them on the number of workers.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.core.errors import InternalError
from paceline.data.seeding import Generators, seed_everything

_here = threading.local()
_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _CancelledError(BaseException):
    """Ends a pass that waits for others which do not come; no error of the user's code."""


def current() -> ShardTurn | None:
    """Return the turn that this thread computes."""
    turn: ShardTurn | None = getattr(_here, "turn", None)
    return turn


def align(number: int) -> int:
    """Bring this thread's counter of autograd nodes to `number` at least; return where it is."""
    with torch.enable_grad():
        leaf = torch.empty(0, requires_grad=True)
        while _sequence_number() < number:
            leaf.view_as(leaf)
    return _sequence_number()


@final
class ShardTurn:
    """One shard's forward pass: `work` on a thread that waits for `resume`."""

    def __init__(self, shard: int, work: Callable[[], Any], model: ShardModel, device: torch.device) -> None:
        self.shard, self.model = shard, model
        self.call: Any = None  # that the pass waits with; None: it has not begun, or has ended
        self.result: Any = None
        self.nodes = 0  # the thread's counter of autograd nodes
        self._work, self._device = work, device
        self._threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._error: BaseException | None = None
        self._answer: Callable[[], Any] | None = None
        self._begun = self._ended = self._cancelled = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        # With the context variables of the caller: log lines know their step, nested runs are refused.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=f"shard {shard}", daemon=True)

    @property
    def has_ended(self) -> bool:
        return self._ended

    def resume(self, answer: Callable[[], Any] | None = None) -> None:
        """Run the pass until it meets the others or ends; its error is raised here. `answer` is called on its
        thread, and what it returns is what `meet` returns there."""
        self._answer = answer
        self.model.enter()
        if self._begun:
            self._go.release()
        else:
            self._begun = True
            self._thread.start()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def meet(self, call: Any) -> Any:
        """Wait until the others are here; called by the pass."""
        self.call, self.nodes = call, _sequence_number()
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise _CancelledError
        self.call = None
        if self._answer is None:
            raise InternalError(f"the pass of shard {self.shard} was resumed without an answer")
        return self._answer()

    def stop(self) -> None:
        """End the thread; a pass that has not ended is left where it waits."""
        if not self._begun:
            return
        self._cancelled = True
        self._go.release()
        self._thread.join()
        self.call = self._answer = self.result = None

    def _run(self) -> None:
        _here.turn = self
        try:
            with ExitStack() as stack:
                if self._stream is not None:
                    stack.enter_context(torch.cuda.device(self._device))
                    stack.enter_context(torch.cuda.stream(self._stream))
                torch.set_num_threads(self._threads)  # also of libraries that keep the number by thread
                # Casts of a weight that is used twice would be shared or not, as other shards end their pass.
                torch.set_autocast_cache_enabled(False)
                self.result = self._work()
        except BaseException as error:  # raised in `resume`, by the thread of the rank
            self._error = error
        self._ended = True
        self.nodes = _sequence_number()
        self._back.release()


@final
class ModelSlots:
    """The places of a model that hold its parameters and buffers, and what was in them before a step."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.current: ShardModel | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let shards put their own tensors in the places, and put back what was there."""
        owners = list(self._module.modules())
        self.parameters = [(child._parameters, key) for child in owners for key in child._parameters]
        self.buffers = [(child._buffers, key) for child in owners for key in child._buffers]
        places: list[tuple[dict[str, Any], str]] = [*self.parameters, *self.buffers]
        kept = [owner[key] for owner, key in places]
        try:
            yield
        finally:
            self.current = None
            for (owner, key), tensor in zip(places, kept, strict=True):
                owner[key] = tensor


@final
class ShardModel:
    """The model as one shard sees it: parameters with gradients of its own over the same memory, buffers and
    random generators of its own."""

    def __init__(self, slots: ModelSlots, *key: int) -> None:
        self._slots, self._key = slots, key
        self._generators: Generators | None = None
        self.leaves: dict[int, Parameter] = {}  # by the id of the model's own
        self._parameters = [self._leaf(owner[key]) for owner, key in slots.parameters]
        copies: dict[int, Tensor] = {}
        self.buffers: list[Tensor | None] = []
        for owner, name in slots.buffers:
            buffer = owner[name]
            if buffer is not None:
                buffer = copies.setdefault(id(buffer), buffer.detach().clone())
            self.buffers.append(buffer)

    def _leaf(self, parameter: Parameter | None) -> Parameter | None:
        if parameter is None:
            return None
        leaf = self.leaves.get(id(parameter))
        if leaf is None:
            leaf = self.leaves[id(parameter)] = Parameter(parameter.detach(), parameter.requires_grad)
            for hook in (parameter._backward_hooks or {}).values():
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return leaf

    def enter(self) -> None:
        """Make this shard's the tensors and generators that the model and the process use."""
        slots = self._slots
        if slots.current is self:
            return
        if slots.current is not None:
            slots.current.leave()
        slots.current = self
        for (parameters, key), parameter in zip(slots.parameters, self._parameters, strict=True):
            parameters[key] = parameter
        for (buffers, key), buffer in zip(slots.buffers, self.buffers, strict=True):
            buffers[key] = buffer
        if self._generators is not None:
            self._generators.enter()
            return
        mtrand.set_bit_generator(np.random.MT19937(0))
        seed_everything(*self._key)

    def leave(self) -> None:
        """Keep what this shard has made of buffers and generators."""
        self.buffers = [owner[key] for owner, key in self._slots.buffers]
        self._generators = Generators.current()
        self._slots.current = None

    def gradients(self, parameters: Sequence[Parameter]) -> list[Tensor | None]:
        return [self.leaves[id(parameter)].grad for parameter in parameters]
