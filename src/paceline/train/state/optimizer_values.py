"""Values that an optimizer or a scheduler keeps, as plain data for JSON next to tensors by name; and back.

Numbers, text, lists, tuples, sets, dicts and tensors, however deep. What an optimizer of the user's own keeps
as attributes of itself counts as well. Anything else is refused by name: a run that continues without it
would quietly be another run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.data.containers import map_leaves
from paceline.train.state.model_state import sparse_parts, sparse_tensor

OWN = "(own)"  # in the place of a parameter's name: what belongs to the optimizer as a whole
_KIND, _VALUE = "kind", "value"
_PLAIN = (bool, int, float, str, type(None))
_KEPT = (*_PLAIN, Tensor, list, tuple, dict, set, frozenset)
# What torch keeps in every optimizer, and what its schedulers put there.
_OF_TORCH = ("defaults", "state", "param_groups", "step", "_step_count", "_opt_called")
_PREFIXES_OF_TORCH = ("_optimizer_", "_zero_grad_", "_warned_", "_patch_", "_hook_")
# Surely memory of former steps, where other objects may be tools.
_MEMORY = (deque, bytearray, np.ndarray, torch.Generator, np.random.Generator)


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a value, with its path."""
    if isinstance(value, Tensor) and value.is_sparse:
        yield from sparse_parts(value, path)
    elif isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple | dict):
        for number, item in enumerate(value.values() if isinstance(value, dict) else value):
            yield from tensors_in(item, f"{path}.{number}")


def to_plain(value: Any, path: str, what: str) -> Any:
    """Return the value without its tensors, which `tensors_in` gives; `what` names it in an error."""
    if isinstance(value, Tensor):
        return {_KIND: "sparse" if value.is_sparse else "tensor", _VALUE: path}
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        items = [to_plain(item, f"{path}.{number}", what) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", _VALUE: items}
    if type(value) in (set, frozenset) and all(isinstance(item, str | int) for item in value):
        return {_KIND: type(value).__name__, _VALUE: sorted(value, key=repr)}
    if isinstance(value, np.generic) and isinstance(value.item(), _PLAIN):
        return value.item()
    if isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        pairs = [
            [key, to_plain(item, f"{path}.{number}", what)]
            for number, (key, item) in enumerate(value.items())
        ]
        return {_KIND: "counter" if isinstance(value, Counter) else "dict", _VALUE: pairs}
    raise UsageError(
        f"{what} is {with_article(value)}: a checkpoint could not hold it, and a resumed run would lack it",
        remedy="keep numbers, text, tensors and lists or dicts of them in an optimizer or a scheduler, or "
        "turn checkpoints off: CheckpointConfig(enabled=False)",
    )


def from_plain(value: Any, tensor_at: Callable[[str], Tensor]) -> Any:
    """Return the value of `to_plain`, with the tensors that `tensor_at` finds."""
    if isinstance(value, list):
        return [from_plain(item, tensor_at) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value[_KIND], value[_VALUE]
    if kind == "tensor":
        return tensor_at(inner)
    if kind == "sparse":
        return sparse_tensor(inner, tensor_at)
    if kind in ("dict", "counter"):
        pairs = {key: from_plain(item, tensor_at) for key, item in inner}
        return Counter(pairs) if kind == "counter" else pairs
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        from_plain(item, tensor_at) for item in inner
    )


def on_device(value: Any, device: torch.device) -> Any:
    """Return a copy with its tensors on a device."""
    return map_leaves(value, lambda tensor: tensor.to(device, copy=True), lambda other: other)


# settings of parameter groups


def setting_to_plain(value: Any, what: str) -> Any:
    """Return a setting (betas, a learning rate tensor) with its tuples and tensors as JSON has them."""
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return [setting_to_plain(item, what) for item in value]
    if isinstance(value, Mapping):
        return {str(key): setting_to_plain(item, what) for key, item in value.items()}
    if not isinstance(value, _PLAIN):
        return to_plain(value, "", what)
    return value


def setting_from_plain(value: Any, like: Any) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return made.to(like.device) if isinstance(like, Tensor) else made
    if isinstance(value, list) and isinstance(like, tuple):
        return tuple(value)
    if isinstance(value, dict) and _KIND in value:
        return from_plain(value, lambda path: torch.empty(0))
    return value


# attributes of an optimizer of the user's own


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what the optimizer keeps in itself; torch's own keep nothing there that a run needs."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return {}
    found = {}
    for name, value in vars(optimizer).items():
        if name in _OF_TORCH or name.startswith(_PREFIXES_OF_TORCH):
            continue
        what = f"{type(optimizer).__name__}.{name}"
        if isinstance(value, Optimizer) and value.state is not optimizer.state and value.state:
            raise UsageError(
                f"{what} is an optimizer with a state of its own, {type(value).__name__}: a checkpoint could "
                "not hold it, and a resumed run would lack it",
                remedy="share one state (inner.state = self.state), give the optimizers side by side as a "
                "list, or turn checkpoints off: CheckpointConfig(enabled=False)",
            )
        if isinstance(value, _KEPT + _MEMORY):
            if is_tool(value):
                continue
            to_plain(value, name, what)
            found[name] = value
    return found


def load_attributes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    device = optimizer.param_groups[0]["params"][0].device
    for name, value in saved.items():
        here = getattr(optimizer, name, None)
        setattr(optimizer, name, on_device(value, here.device if isinstance(here, Tensor) else device))


def is_tool(value: Any) -> bool:
    """Return whether an optimizer or a scheduler works with a value (functions, modules, parameters in a
    list) rather than remembers it."""
    if isinstance(value, list | tuple | dict):
        return any(map(is_tool, value.values() if isinstance(value, dict) else value))
    return callable(value) or isinstance(value, torch.nn.Parameter)
