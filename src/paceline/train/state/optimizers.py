"""The user's optimizers: built over the model's parameters, their state by parameter name.

State is kept by name and not by number, so that a checkpoint means the same whatever the order in which
parameters were handed over. What kinds of values can be kept is optimizer_values.py's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from paceline.core.errors import UsageError
from paceline.core.wording import counted, with_article
from paceline.train.state.optimizer_values import (
    OWN,
    from_plain,
    load_attributes,
    on_device,
    own_attributes,
    setting_from_plain,
    setting_to_plain,
    tensors_in,
    to_plain,
)

_log = logging.getLogger(__name__)

OptimizerFactory = Callable[["Parameters"], Optimizer | Sequence[Optimizer]]


@final
class Parameters(list[Parameter]):
    """Argument of an optimizer factory: the parameters that are trained, and their names in `named`.

    lambda p: torch.optim.AdamW([{"params": [t for n, t in p.named.items() if t.ndim > 1]}, ...])
    """

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        super().__init__(named.values())
        self.named = dict(named)


def build(given: OptimizerFactory | Optimizer | Sequence[Optimizer], module: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a module, refused where they cannot work."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not named:
        raise UsageError(
            "the model has no parameter that is trained", remedy="set requires_grad_(True) on some of them"
        )
    made: Any = given
    if not isinstance(given, Optimizer | Sequence):
        if not callable(given):
            raise UsageError(
                f"the optimizer is {with_article(given)}",
                remedy="pass a function of the parameters, such as lambda p: torch.optim.AdamW(p, 1e-3)",
            )
        made = given(Parameters(named))
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    for optimizer in optimizers:
        _check(optimizer)
    _check_cover(optimizers, named, module)
    return optimizers


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the optimizer factory returned {with_article(optimizer)}",
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
    held = [(one, p) for one in optimizers for group in one.param_groups for p in group["params"]]
    for optimizer, parameter in held:
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


def tensors_of(optimizers: Sequence[Optimizer], module: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of the optimizers' state, as "optimizer/<number>/<parameter>/<key>"; not copied."""
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for name, state in _state_by_name(optimizer, module).items():
            for key, value in state.items():
                for path, tensor in tensors_in(value, key):
                    found[f"optimizer/{number}/{name}/{path}"] = tensor
    return found


def _state_by_name(optimizer: Optimizer, module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return all that the optimizer remembers: by parameter, and what it keeps as its own attributes."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or not isinstance(state, Mapping):
            shaped = isinstance(parameter, Tensor)
            key = f"a tensor of shape {tuple(parameter.shape)}" if shaped else repr(parameter)
            raise UsageError(
                f"{type(optimizer).__name__} keeps state under {key}, which is no parameter of the model: a "
                "checkpoint could not hold it",
                remedy="let the optimizer keep it in the state of a parameter or as an attribute of its own, "
                "or turn checkpoints off: CheckpointConfig(enabled=False)",
            )
        found[name] = dict(state)
    own = own_attributes(optimizer)
    return {**found, OWN: own} if own else found


def plain_state_of(optimizers: Sequence[Optimizer], module: nn.Module) -> list[dict[str, Any]]:
    """Return what is not a tensor: settings of the groups, and plain entries of the state by parameter."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = []
    for optimizer in optimizers:
        kind, groups = type(optimizer).__name__, []
        for number, group in enumerate(optimizer.param_groups):
            plain = {
                key: setting_to_plain(value, f"{kind}, {key} of group {number}")
                for key, value in group.items()
                if key != "params"
            }
            groups.append(plain | {"params": [_name_of(one, names, optimizer) for one in group["params"]]})
        state = {
            name: {key: to_plain(value, key, f"{kind}, {key} of {name}") for key, value in kept.items()}
            for name, kept in _state_by_name(optimizer, module).items()
        }
        found.append({"type": kind, "groups": groups, "state": state})
    return found


def _name_of(parameter: Tensor, names: Mapping[int, str], optimizer: Optimizer) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UsageError(
            f"{type(optimizer).__name__} was given a parameter of shape {tuple(parameter.shape)} during the "
            "run that is not one of the model's",
            remedy="give all parameters and groups to the optimizer before the run",
        )
    return name


def load(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    plain: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
    *,
    scheduled: bool = False,
) -> None:
    """Load saved state into the optimizers of this run. `scheduled`: schedulers change settings of groups, so
    that only the learning rate which they begin with tells whether the caller has changed it."""
    if [type(optimizer).__name__ for optimizer in optimizers] != [saved["type"] for saved in plain]:
        raise UsageError(
            f"the checkpoint was written with {[saved['type'] for saved in plain]}, "
            f"this run has {[type(optimizer).__name__ for optimizer in optimizers]}",
            remedy="resume with the same optimizers, or start a new run from the exported weights",
        )
    for number, (optimizer, saved) in enumerate(zip(optimizers, plain, strict=True)):
        names = _check_groups(optimizer, module, saved)
        by_name = {}
        for name, entries in saved["state"].items():
            tensor_at = partial(_tensor_at, tensors, f"optimizer/{number}/{name}")
            by_name[name] = {key: from_plain(value, tensor_at) for key, value in entries.items()}
        load_attributes(optimizer, by_name.pop(OWN, {}))
        state = {index: by_name[name] for index, name in enumerate(names) if by_name.get(name)}
        groups = []
        current = optimizer.state_dict()["param_groups"]
        for group, old in zip(current, saved["groups"], strict=True):
            _log_changed(saved["type"], group, old, scheduled)
            settings = {key: setting_from_plain(value, group.get(key)) for key, value in old.items()}
            groups.append({**group, **settings, "params": group["params"]})
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        _put_back_bits(optimizer, state)


def _tensor_at(tensors: Mapping[str, Tensor], prefix: str, path: str) -> Tensor:
    return tensors[f"{prefix}/{path}"]


def _check_groups(optimizer: Optimizer, module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Refuse other groups than the saved ones; return the names of all parameters in their order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    ordered = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    here, kept = [set(group) for group in ordered], [set(group["params"]) for group in saved["groups"]]
    if here == kept:
        return [name for group in ordered for name in group]
    if len(here) != len(kept):
        what = f"{counted(len(kept), 'parameter group')}, and {len(here)} in this run"
    else:
        moved = sorted(set().union(*(a ^ b for a, b in zip(here, kept, strict=True))))
        what = f"other parameters in its groups: {', '.join(moved[:5])}{' ...' if len(moved) > 5 else ''}"
    raise UsageError(
        f"{saved['type']} has in the checkpoint {what}",
        remedy="resume with the model and the parameter groups that the checkpoint was written with",
    )


def _log_changed(kind: str, group: Mapping[str, Any], saved: Mapping[str, Any], scheduled: bool) -> None:
    """Warn about settings that were changed meanwhile: those of the run count."""
    names = {"initial_lr"} if scheduled else saved.keys() - {"params", "lr"}
    changed = [
        f"{'lr' if key == 'initial_lr' else key}={saved[key]} (here {setting_to_plain(group[key], key)})"
        for key in saved
        if key in names and key in group and setting_to_plain(group[key], key) != saved[key]
    ]
    if changed:
        _log.warning("the run continues with the settings of %s that it had: %s", kind, ", ".join(changed))


def _put_back_bits(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Restore the bits of loaded state: torch casts it to its parameter's dtype, which not every optimizer
    keeps."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state.items():
        kept = optimizer.state[parameters[index]]
        device = parameters[index].device
        for key, value in entries.items():
            if not isinstance(value, Tensor):
                kept[key] = on_device(value, device)
            elif kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device, copy=True)
