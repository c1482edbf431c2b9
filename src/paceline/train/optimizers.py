"""The user's optimizers: built over the model's parameters, their state by parameter name.

State is kept by name and not by number, so that a checkpoint means the same whatever the order in which
parameters were handed over. Must not know when a step is taken.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from paceline.core.errors import UsageError

_log = logging.getLogger(__name__)

OptimizerFactory = Callable[["Parameters"], Optimizer | Sequence[Optimizer]]


@final
class Parameters(list[Parameter]):
    """What an optimizer factory gets: the parameters that are trained, and their names in `named`.

    lambda p: torch.optim.AdamW([{"params": [t for n, t in p.named.items() if t.ndim > 1]}, ...])
    """

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        super().__init__(named.values())
        self.named = dict(named)


def build(given: OptimizerFactory | Optimizer | Sequence[Optimizer], module: nn.Module) -> list[Optimizer]:
    """The optimizers of a module, refused where they cannot work."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not named:
        raise UsageError(
            "the model has no parameter that is trained", remedy="set requires_grad_(True) on some of them"
        )
    made: Any = given
    if not isinstance(given, Optimizer | Sequence):
        made = given(Parameters(named))
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    for optimizer in optimizers:
        _check(optimizer)
    _check_cover(optimizers, named, module)
    return optimizers


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the optimizer factory returned a {type(optimizer).__name__}",
            remedy="return a torch.optim.Optimizer, or a list of them",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise UsageError(
            f"{type(optimizer).__name__} cannot be used: it computes the loss several times within one step, "
            "and a step here is one pass over its samples, summed over all workers once",
            remedy="use an optimizer whose step() needs no closure, such as SGD or AdamW",
        )


def _check_cover(optimizers: Sequence[Optimizer], named: Mapping[str, Parameter], module: nn.Module) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in seen:
                    raise UsageError(
                        f"parameter {names.get(id(parameter), '?')} is in two optimizers",
                        remedy="give each parameter to one of them",
                    )
                seen.add(id(parameter))
                if id(parameter) not in names:
                    raise UsageError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} "
                        "that is not one of the model's",
                        remedy="build the optimizer from the parameters of the model that is trained",
                    )
    left_out = [name for name, parameter in named.items() if id(parameter) not in seen]
    if left_out:
        raise UsageError(
            f"no optimizer holds {', '.join(left_out[:5])}{' ...' if len(left_out) > 5 else ''}",
            remedy="give every parameter to an optimizer, or freeze it with requires_grad_(False)",
        )


def _names_in_order(optimizer: Optimizer, module: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(optimizers: Sequence[Optimizer], module: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the optimizers' state, as "optimizer/<number>/<parameter>/<key>"; not copied."""
    found: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{number}/{names[id(parameter)]}/{key}"] = value
    return found


def plain_state_of(optimizers: Sequence[Optimizer], module: nn.Module) -> list[dict[str, Any]]:
    """What is not a tensor: settings of the groups, and plain entries of the state by parameter."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        {
            "type": type(optimizer).__name__,
            "groups": [
                {key: _plain(value) for key, value in group.items() if key != "params"}
                | {"params": [names[id(parameter)] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ],
            "state": {
                names[id(parameter)]: {
                    key: _plain(value) for key, value in state.items() if not isinstance(value, Tensor)
                }
                for parameter, state in optimizer.state.items()
            },
        }
        for optimizer in optimizers
    ]


def _plain(value: Any) -> Any:
    """Tuples and tensors of a setting (betas, a learning rate tensor) as JSON has them."""
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _unplain(value: Any, like: Any) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return made.to(like.device) if isinstance(like, Tensor) else made
    if isinstance(value, list) and isinstance(like, tuple):
        return tuple(value)
    return value


def load(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    plain: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Puts saved state into the optimizers of this run."""
    if [type(optimizer).__name__ for optimizer in optimizers] != [saved["type"] for saved in plain]:
        raise UsageError(
            f"the checkpoint was written with {[saved['type'] for saved in plain]}, "
            f"this run has {[type(optimizer).__name__ for optimizer in optimizers]}",
            remedy="resume with the same optimizers, or start a new run from the exported weights",
        )
    for number, (optimizer, saved) in enumerate(zip(optimizers, plain, strict=True)):
        names = _names_in_order(optimizer, module)
        _check_groups(optimizer, module, saved)
        by_name = {name: dict(entries) for name, entries in saved["state"].items()}
        prefix = f"optimizer/{number}/"
        for full_name, tensor in tensors.items():
            if full_name.startswith(prefix):
                name, _, key = full_name.removeprefix(prefix).rpartition("/")
                by_name.setdefault(name, {})[key] = tensor
        state = {index: by_name[name] for index, name in enumerate(names) if by_name.get(name)}
        groups = []
        current = optimizer.state_dict()["param_groups"]
        for group, old in zip(current, saved["groups"], strict=True):
            _say_changed(saved["type"], group, old)
            settings = {key: _unplain(value, group.get(key)) for key, value in old.items() if key != "params"}
            groups.append({**group, **settings})
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        _put_back_bits(optimizer, state)


def _check_groups(optimizer: Optimizer, module: nn.Module, saved: Mapping[str, Any]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    here = [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]
    kept = [set(group["params"]) for group in saved["groups"]]
    if here == kept:
        return
    if len(here) != len(kept):
        what = f"{len(kept)} parameter groups, and {len(here)} in this run"
    else:
        moved = sorted(set().union(*(a ^ b for a, b in zip(here, kept, strict=True))))
        what = f"other parameters in its groups: {', '.join(moved[:5])}{' ...' if len(moved) > 5 else ''}"
    raise UsageError(
        f"{saved['type']} has in the checkpoint {what}",
        remedy="resume with the model and the parameter groups that the checkpoint was written with",
    )


def _say_changed(kind: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """The settings of the run count; whoever changed them meanwhile is told that nothing comes of it."""
    changed = [
        f"{'lr' if key == 'initial_lr' else key}={saved[key]} (here {_plain(group[key])})"
        for key in saved
        if key in group and key not in ("params", "lr") and _plain(group[key]) != saved[key]
    ]
    if changed:
        _log.warning("the run goes on with the settings of %s that it has had: %s", kind, ", ".join(changed))


def _put_back_bits(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """torch casts loaded state to the dtype of its parameter, which is not what every optimizer keeps."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state.items():
        kept = optimizer.state[parameters[index]]
        for key, value in entries.items():
            if isinstance(value, Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device, copy=True)
