"""A trained model as a folder: for Ray Serve, for a Tune checkpoint, for any program that has Paceline.

    model.pkl       the module with its weights, by cloudpickle: classes of the user's script travel with it
    weights.pt      its state_dict alone, for torch.load(..., weights_only=True)
    manifest.json   what the module must hash to, the dtype of its inputs, the settings, the metrics

Loading runs code of `model.pkl`, as every pickle does: load only folders that you trust. What does not hash
as the manifest says is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from paceline.core import atomic_file
from paceline.core.errors import PlatformError, UsageError
from paceline.core.untrusted import redact_credentials
from paceline.engines.ray.ray_connection import needing_ray

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data.sources import Source

_MODEL: Final = "model.pkl"
_WEIGHTS: Final = "weights.pt"
_MANIFEST: Final = "manifest.json"
INPUT_DTYPE: Final = "input_dtype"


def write(folder: Path, module: nn.Module, about: Mapping[str, Any]) -> Path:
    """Write a module, on the CPU and in evaluation mode; the manifest comes last and completes the folder.
    Exports are handed around: what is said `about` the module is written without passwords in URLs."""
    import copy

    import cloudpickle
    import torch

    from paceline.train.state.model_state import state_hash

    plain = copy.deepcopy(module).cpu().eval()
    pickled = cloudpickle.dumps(plain)
    weights = io.BytesIO()
    torch.save(plain.state_dict(), weights)
    atomic_file.replace_file(folder / _MODEL, pickled)
    atomic_file.replace_file(folder / _WEIGHTS, weights.getvalue())
    manifest = {
        "state_hash": state_hash(plain),
        "sha256": hashlib.sha256(pickled).hexdigest(),
        "torch": str(torch.__version__),
        **{name: _published(value) for name, value in about.items()},
    }
    atomic_file.replace_file(folder / _MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")
    return folder


def dtype_of_inputs(source: Source) -> str | None:
    """Return the dtype of the model's first input; None where only the run itself reads the data."""
    import numpy as np
    import torch

    from paceline.data.seeding import set_aside

    if not source.size:
        return None
    try:
        with set_aside():
            found = source.fetch(np.zeros(1, dtype=np.int64)).data
    except Exception:  # the dataset's own code: its files may be on the workers' hosts alone
        return None
    while isinstance(found, Mapping | tuple | list) and found:
        found = next(iter(found.values() if isinstance(found, Mapping) else found))
    return str(found.dtype).removeprefix("torch.") if isinstance(found, torch.Tensor) else None


def load(folder: str | Path) -> nn.Module:
    """Return the module of an exported folder."""
    return _read(folder)[0]


def _published(value: Any) -> Any:
    """Return a value as JSON has it, without credentials."""
    if isinstance(value, Mapping):
        return {str(name): _published(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_published(one) for one in value]
    if value is None or isinstance(value, bool | float):
        return value
    return int(value) if isinstance(value, numbers.Integral) else redact_credentials(str(value))


def _read(folder: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module and the manifest of an exported folder."""
    import pickle

    from paceline.train.state.model_state import state_hash

    place = Path(folder)
    try:
        manifest = json.loads((place / _MANIFEST).read_bytes())
        pickled = (place / _MODEL).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{place} holds no exported model: {error}", remedy="give a folder that `RayTrainer.export` wrote"
        ) from error
    if hashlib.sha256(pickled).hexdigest() != manifest["sha256"]:
        raise PlatformError(
            f"{place / _MODEL} is damaged: its bytes are not those that were written",
            remedy="export the model again, or copy the folder again",
        )
    module: nn.Module = pickle.loads(pickled)
    if state_hash(module) != manifest["state_hash"]:
        raise PlatformError(
            f"the weights in {place} are not those that were exported",
            remedy=f"load them with the torch that wrote them, {manifest['torch']}",
        )
    return module.eval(), manifest


@final
class ServedModel:
    """A deployment of Ray Serve: JSON {"inputs": [[...], ...]} in, {"outputs": [[...], ...]} out; `predict`
    for calls by handle."""

    def __init__(self, folder: str) -> None:
        import torch

        self._model, manifest = _read(folder)
        named = manifest.get(INPUT_DTYPE)
        self._dtype: torch.dtype | None = None if named is None else getattr(torch, named)

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for a batch, as lists."""
        import torch

        with torch.inference_mode():
            return self._model(self._as_inputs(inputs)).tolist()

    def _as_inputs(self, inputs: Any) -> torch.Tensor:
        """Return numbers with the dtype that the model was trained with. JSON does not tell 1.0 from 1."""
        import torch

        plain, chosen = torch.as_tensor(inputs), self._dtype
        if plain.is_floating_point():
            if chosen is None:
                weights = (*self._model.parameters(), *self._model.buffers())
                chosen = next((one.dtype for one in weights if one.is_floating_point()), plain.dtype)
            if not chosen.is_floating_point:
                return plain  # for the model to refuse: 1.7 would become 1
        return torch.as_tensor(inputs, dtype=chosen)

    async def __call__(self, request: Any) -> Any:
        body = await request.json()
        if not isinstance(body, dict) or "inputs" not in body:
            return {"error": 'send {"inputs": [[...], ...]}'}
        return {"outputs": self.predict(body["inputs"])}


def serve_application(folder: str | Path, **options: Any) -> Any:
    """Return the application of an exported model: `ray.serve.run(paceline.RayTrainer.serve(folder))`.
    `options` are those of the deployment, e.g. num_replicas."""
    with needing_ray():
        from ray import serve
    return serve.deployment(ServedModel).options(**options).bind(str(Path(folder).absolute()))
