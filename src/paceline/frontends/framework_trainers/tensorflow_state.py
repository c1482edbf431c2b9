"""Variables of a Keras model and its optimizer as tensors of a version, and back; Keras 3 and tf_keras.

Variables are found again by their order, in which a model's function makes them: Keras numbers the names of a
second model of the same process on. Types that no version knows by themselves travel as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.checkpoint.loader import Checkpoint
from paceline.core.errors import UsageError
from paceline.train.state.model_state import MODEL, hash_of

_OPTIMIZER: Final = "optimizer/0/"
_KNOWN: Final = frozenset(
    ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
)


@final
class KerasState:
    """All variables of a model and of its optimizer, which are built."""

    def __init__(self, model: Any) -> None:
        self.model = model
        made = model.optimizer.variables
        own: Sequence[Any] = made() if callable(made) else made
        self._variables = [*_named(model.variables, MODEL), *_named(own, _OPTIMIZER)]

    @property
    def weights(self) -> int:
        """The number of numbers in the model, for comparisons."""
        return sum(int(np.prod(one.shape)) for name, one in self._variables if name.startswith(MODEL))

    def contents(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return what a version holds."""
        arrays = {name: np.asarray(one.numpy()) for name, one in self._variables}
        kinds = [[name, str(one.dtype), list(one.shape)] for name, one in arrays.items()]
        return {name: _tensor(one) for name, one in arrays.items()}, {"variables": kinds}

    def arrays_of(self, found: Checkpoint) -> list[NDArray[Any]]:
        """Return the values of a version, in the order of the variables; refuse one of another model."""
        saved: list[Any] = found.state["variables"]
        tensors = found.tensors()
        if len(saved) != len(self._variables):
            raise UsageError(
                f"version {found.version} has {len(saved)} variables, and the model and its optimizer have "
                f"{len(self._variables)}",
                remedy="resume with the model and the optimizer that the version was written with",
            )
        values = []
        for (name, dtype, shape), (here, variable) in zip(saved, self._variables, strict=True):
            if list(variable.shape) != list(shape):
                raise UsageError(
                    f"{here} has shape {tuple(variable.shape)}, and {name} in version {found.version} has "
                    f"{tuple(shape)}",
                    remedy="resume with the model and the optimizer that the version was written with",
                )
            values.append(_array(tensors[name], dtype, shape))
        return values

    def assign(self, values: Sequence[NDArray[Any]]) -> None:
        for (_, variable), value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def to_bytes(self, values: Sequence[NDArray[Any]]) -> bytes:
        """Return values as bytes for another worker with the same variables."""
        return b"".join(np.ascontiguousarray(value).tobytes() for value in values)

    def from_bytes(self, data: bytes) -> list[NDArray[Any]]:
        values, at = list[NDArray[Any]](), 0
        for _, variable in self._variables:
            like = np.asarray(variable.numpy())
            values.append(np.frombuffer(data, like.dtype, like.size, at).reshape(like.shape))
            at += like.nbytes
        return values

    def hash(self) -> str:
        """Return the hash of the model's variables, as that of a torch model is made."""
        own = {name: one for name, one in self.contents()[0].items() if name.startswith(MODEL)}
        return hash_of({name.removeprefix(MODEL): one for name, one in own.items()})


def _named(variables: Sequence[Any], prefix: str) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for one in variables:
        name = prefix + str(getattr(one, "path", one.name)).removesuffix(":0")
        copy, unique = 1, name
        while unique in found:
            copy += 1
            unique = f"{name}+{copy}"
        found[unique] = one
    return list(found.items())


def _tensor(array: NDArray[Any]) -> Tensor:
    if str(array.dtype) not in _KNOWN:
        array = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return torch.from_numpy(np.array(array))  # a copy: what TensorFlow hands out may not be written to


def _array(tensor: Tensor, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    array = tensor.numpy()
    if str(array.dtype) == dtype:
        return array.reshape(shape)
    import ml_dtypes  # noqa: F401  (registers bfloat16 and others with NumPy; tensorflow brings it)

    return np.frombuffer(array.tobytes(), np.dtype(dtype)).reshape(shape)
