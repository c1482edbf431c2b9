"""Refuse habits of a plain loop that would train something else here, at the call or at the next backward;
and numbers that training cannot continue from.

A step sums the gradients of its shards and applies them once, so `zero_grad`, `step`, `clip_grad_norm_` or a
`backward` beside the run's own lose or double gradients. `guarded` refuses the calls by name; `GradientWatch`
finds any other way to the same end by the version counters of gradients and parameters, and by their memory:
what is done through `.data`, and what a GradScaler does, moves no counter.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter, is_
from types import MethodType
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.core.errors import InternalError, UsageError
from paceline.core.wording import counted
from paceline.train.step.weight_update import WeightUpdate

_ABSENT = object()
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_LOOKED_AT = 64  # parameters in a step
_READ = 2  # tensors whose memory is compared in a step
_WINDOW = 256  # bytes of each of them
_WORD = 4
_gradient: Callable[[Parameter], Tensor | None] = attrgetter("grad")
_version: Callable[[Tensor], int] = attrgetter("_version")
_read: Callable[[int, int], bytes] = ctypes.string_at


@final
class GradientWatch:
    """Check that, from `opened` to the sum of a step, only the run's own `backward` changes gradients, and
    nothing changes the parameters that are trained.

    Of a model with many parameters every step looks at some, in turn: what such a line does to all of them
    is seen at once, what it does to one of them within a few steps, and a look costs some microseconds. The
    same holds for the memory that is compared, on a CPU.
    """

    def __init__(self, trained: Mapping[str, Parameter]) -> None:
        self._all = list(trained.items())
        self._stride = -(-len(self._all) // _LOOKED_AT) or 1
        self._names: list[str] = []
        self._parameters: list[Parameter] = []
        self._gradients: list[Tensor | None] = []
        self._changes = self._moves = 0  # in place: of the gradients, of the parameters
        self._windows: list[tuple[int, int, int]] = []
        self._memory: list[bytes | None] = []  # of the gradients
        self._weights: list[bytes | None] = []

    def opened(self, step: int) -> None:
        """Begin to watch a step, or a step that continues in another group: the parameters must stay the same
        objects."""
        looked_at = self._all[step % self._stride :: self._stride]
        self._names, self._parameters = [name for name, _ in looked_at], [one for _, one in looked_at]
        self._moves = sum(map(_version, self._parameters))
        self._windows = _windows(self._parameters, step)
        self._weights = self._contents(self._parameters)

    def start_shard(self) -> None:
        """Begin a shard: no parameter has a gradient yet."""
        self._gradients, self._changes, self._memory = [None] * len(self._parameters), 0, []

    def after_backward(self) -> None:
        self._gradients = list(map(_gradient, self._parameters))
        self._changes = _changes(self._gradients)
        self._memory = self._contents(self._gradients)

    def check_gradients(self, step: int) -> None:
        """Refuse gradients that user code changed since the last backward pass."""
        now = list(map(_gradient, self._parameters))
        same = all(map(is_, now, self._gradients)) and _changes(now) == self._changes
        if not same or _rewritten(self._memory, self._contents(now)):
            self._refuse_gradients(now, step)

    def finish_shard(self, step: int) -> None:
        """Refuse changed gradients or weights at the end of a shard, before its gradients are added."""
        self.check_gradients(step)
        self._gradients = []
        moved = sum(map(_version, self._parameters)) != self._moves
        if moved or _rewritten(self._weights, self._contents(self._parameters)):
            raise UsageError(
                f"step {step}: weights ({_some(self._names)}, or one of them) changed before the step's "
                "gradient was applied: which samples were seen before and after would depend on the workers",
                remedy="leave the weights to the run, which calls the optimizer once a step: delete "
                "optimizer.step() and assignments to weights and their .data from the loop, the model's "
                "forward and hooks (Embedding(max_norm=...) is one); torch.nn.utils.parametrize constrains "
                "a weight",
            )

    def _contents(self, tensors: Sequence[Tensor | None]) -> list[bytes | None]:
        """Return the windows of these tensors. None: not plain memory of this process; empty: smaller than it
        was."""
        return [_bytes(tensors[index], start, size) for index, start, size in self._windows]

    def _refuse_gradients(self, now: Sequence[Tensor | None], step: int) -> NoReturn:
        pairs = list(zip(self._names, now, self._gradients, strict=True))
        replaced = [(name, gradient) for name, gradient, before in pairs if gradient is not before]
        if not replaced:
            what = f"the gradients of {_some(self._names)} were changed"
        elif replaced[0][1] is None:
            what = f"the gradients of {_some([name for name, _ in replaced])} were removed"
        else:
            what = f"{_some([name for name, _ in replaced])} have gradients that were made"
        raise UsageError(
            f"step {step}: {what} by something other than the run's own backward: the step would train "
            "something else",
            remedy="delete zero_grad(), loss.backward(), scaler.unscale_() and clip_grad_norm_(): the run "
            "does backward once for every loss, and TrainConfig(clip_norm=...) clips the summed gradient; "
            "for gradients of your own use torch.autograd.grad",
        )


def _changes(gradients: Sequence[Tensor | None]) -> int:
    return sum(gradient._version for gradient in gradients if gradient is not None)


def _windows(parameters: Sequence[Tensor], step: int) -> list[tuple[int, int, int]]:
    """Choose some bytes of some of these parameters, others in each step: which, from where, how much."""
    places = []
    for turn in range(min(_READ, len(parameters))):
        index = (step * _READ + turn) % len(parameters)
        one = parameters[index]
        if size := one.numel() * one.element_size():
            start = step % -(-size // _WINDOW) * _WINDOW
            places.append((index, start, min(_WINDOW, size - start)))
    return places


def _bytes(tensor: Tensor | None, start: int, size: int) -> bytes | None:
    if tensor is None or type(tensor) not in (Tensor, Parameter) or not tensor.is_cpu:
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    # `.data` may have been given another size since: what lies behind it is not this tensor's.
    if tensor.numel() * tensor.element_size() < start + size:
        return b""
    return _read(tensor.data_ptr() + start, size)


def _rewritten(before: Sequence[bytes | None], now: Sequence[bytes | None]) -> bool:
    """Return whether a program wrote there. One changed word may be memory corruption, which the ranks find
    and repair (replica_agreement.py), and is not a mistake of the program."""
    if before == now:
        return False
    words = 0
    for one, other in zip(before, now, strict=False):
        if one is not None and other is not None:
            words += sum(one[i : i + _WORD] != other[i : i + _WORD] for i in range(0, len(one), _WORD))
    return words > 1


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


@contextmanager
def guarded(optimizers: Sequence[Optimizer], update: WeightUpdate) -> Iterator[None]:
    """Refuse `step` and `zero_grad` of its optimizers while the loop runs, except in the run's own `update`.
    Not those of the module, which the loop may copy or pickle with all its attributes; `GradientWatch` sees
    what they do."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            stack.enter_context(_replaced(optimizer, "step", f"{kind}.step()", _STEP, update))
            stack.enter_context(_replaced(optimizer, "zero_grad", f"{kind}.zero_grad()", _ZERO, update))
        yield


_STEP = (
    "the run applies the gradient of all workers' samples once a step, by itself",
    "delete the line optimizer.step(), with a GradScaler all of scaler.scale, unscale_, step and update "
    '(TrainConfig(precision="fp16") scales the loss); after run.backward(loss) nothing is left to do',
)
_ZERO = (
    "the run clears gradients between steps by itself, and here the samples so far would be lost",
    "delete the line zero_grad() from the loop",
)


@contextmanager
def _replaced(
    owner: Optimizer, name: str, called: str, words: tuple[str, str], update: WeightUpdate
) -> Iterator[None]:
    """Replace an optimizer method for the duration of the loop; restore a scheduler's wrapper on exit."""
    before: Callable[..., Any] = getattr(owner, name)
    own = vars(owner).get(name, _ABSENT)

    def refuse(_: Optimizer, *arguments: Any, **settings: Any) -> Any:
        if update.applying:
            return before(*arguments, **settings)
        why, remedy = words
        raise UsageError(f"{called} was called inside the loop of a session: {why}", remedy=remedy)

    # With its marks, by which a scheduler knows that the step is the one that it counts; a method, as a
    # scheduler that is made in the loop expects it to be.
    vars(refuse).update(getattr(before, "__dict__", {}))
    setattr(owner, name, MethodType(refuse, owner))
    try:
        yield
    finally:
        if own is _ABSENT:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, own)


def refuse_wrapped(module: nn.Module) -> None:
    """Refuse a model whose gradients a wrapper exchanges as well: torch's, or ours for loops without a
    run."""
    for name, child in module.named_modules():
        kind = next((cls.__name__ for cls in type(child).__mro__ if cls.__name__ in _WRAPPERS), None)
        if kind is not None:
            where = f"the model's {name}" if name else "the model"
            raise UsageError(
                f"{where} is wrapped in {kind}, which exchanges gradients between ranks itself: they "
                "would be summed twice",
                remedy="give the plain module (model.module); the run sums over all workers",
            )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    # The loop may still call a wrapper around the very module that the session was given.
    parts = {id(child) for child in module.modules()}
    for candidate in gc.get_objects():
        if (
            issubclass(type(candidate), DistributedDataParallel)
            and id(vars(candidate)["_modules"]["module"]) in parts
        ):
            raise UsageError(
                "the model is also inside a torch DistributedDataParallel, which exchanges gradients between "
                "ranks itself: they would be summed twice",
                remedy="do not wrap the model; the run sums over all workers",
            )


# errors of a step that cannot continue


def refuse_freezing(changed: Sequence[str], step: int) -> NoReturn:
    """Refuse parameters that began or ceased to be trained."""
    raise UsageError(
        f"requires_grad of {', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''} changed during "
        f"the run, before step {step}: which parameters are trained is fixed when it starts",
        remedy="end the run, change it, and begin another run with these weights; or train them from "
        "the start, with a learning rate of their own",
    )


def check_applied(step: int, planned: int, applied: int, left_out: int) -> None:
    """Refuse a sum whose counters do not add up: the last defence of "every sample exactly once"."""
    if applied + left_out == planned:
        return
    raise InternalError(
        f"step {step} has {counted(planned, 'sample')}, and the sum of all shards holds {applied}, "
        f"with {left_out} left out: it was not applied",
        remedy="report this with the run's journal; the run can be resumed from its last checkpoint",
    )


def refuse_other_model(step: int) -> NoReturn:
    """Refuse a loss that no parameter of the model takes part in."""
    raise UsageError(
        f"step {step} gave no gradient to any parameter of the model that is trained: the loss was computed "
        "by another model, or by parameters that are not the model's",
        remedy="use the model that the objective is called with (def objective(model, batch)): every worker "
        "trains a copy of its own, and one from outside of the function is another; in a session, the module "
        "that was given to it",
    )


def refuse_turn(step: int, turn: int, kind: str) -> NoReturn:
    """Refuse a loss that no parameter of the optimizer whose turn it is takes part in."""
    raise UsageError(
        f"step {step} is a turn of optimizer {turn} ({kind}), and its loss gave no gradient to any parameter "
        "of that optimizer: nothing would be learned in these turns",
        remedy="return the loss of the optimizer whose turn it is: def objective(model, batch, step) is told "
        "it as step.optimizer, a session as micro.info.optimizer",
    )


def check_loss(given: Any) -> None:
    """Refuse a loss that nothing can be learned from."""
    if not isinstance(given, Tensor):
        what = f"the loss is a {type(given).__name__}"
    elif given.numel() != 1:
        what = f"the loss is a tensor of shape {tuple(given.shape)}"
    elif given.requires_grad:
        return
    else:
        what = "the loss does not depend on any parameter that is trained"
    raise UsageError(
        what,
        remedy="give the mean loss of the micro-batch's samples as one number that the model computed, "
        "not detached, not under torch.no_grad()",
    )


class NonFiniteLossError(UsageError):
    """The summed loss of a step is not a number that training can continue from; the step was not applied."""


def check_finite(loss: Tensor, step: int) -> None:
    """Refuse a loss that is NaN or infinite, where the settings end the run there. Waits for the device.

    Every rank has the same summed loss and refuses it alike, before the step is decided: nothing is applied.
    """
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"the loss of step {step} is {value}: the step was not applied, and the run ends "
            '(nonfinite="stop")',
            remedy="look at the samples of this step, at the learning rate and at clip_norm; then continue "
            "from the last version with finite weights (`paceline checkpoint ls` says which are not)",
            step=step,
        )


def is_finite(module: nn.Module) -> bool:
    """Return whether all weights and buffers are finite."""
    with torch.no_grad():
        values = [*module.parameters(), *module.buffers()]
        return all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point())
