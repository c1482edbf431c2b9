"""A trained model as a folder: for Ray Serve, for a Tune checkpoint, for any program that has Paceline.

    model.pkl       the module with its weights, by cloudpickle: classes of the user's script travel with it
    weights.pt      its state_dict alone, for torch.load(..., weights_only=True)
    manifest.json   what the module must hash to, the settings, the metrics

Loading runs code of `model.pkl`, as every pickle does: load only folders that you trust. What does not hash
as the manifest says is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from paceline.core import atomic_file
from paceline.core.errors import PlatformError, UsageError
from paceline.engines.ray.ray_connection import needing_ray

if TYPE_CHECKING:
    from torch import nn

_MODEL: Final = "model.pkl"
_WEIGHTS: Final = "weights.pt"
_MANIFEST: Final = "manifest.json"


def write(folder: Path, module: nn.Module, about: Mapping[str, Any]) -> Path:
    """Write a module, on the CPU and in evaluation mode; the manifest comes last and completes the folder."""
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
        **about,
    }
    atomic_file.replace_file(folder / _MANIFEST, json.dumps(manifest, indent=2, default=str).encode() + b"\n")
    return folder


def load(folder: str | Path) -> nn.Module:
    """Return the module of an exported folder."""
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
    return module.eval()


@final
class ServedModel:
    """A deployment of Ray Serve: JSON {"inputs": [[...], ...]} in, {"outputs": [[...], ...]} out; `predict`
    for calls by handle."""

    def __init__(self, folder: str) -> None:
        self._model = load(folder)

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for a batch, as lists."""
        import torch

        with torch.inference_mode():
            return self._model(torch.as_tensor(inputs)).tolist()

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
