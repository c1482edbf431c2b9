"""Fingerprint of this machine's arithmetic: what the bits of a run depend on besides its definition.

Two machines with equal fingerprints compute the same bits; others may not, and exact training refuses to
continue a run on them, naming the difference.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from paceline.core.errors import PlatformError


def fingerprint(device: torch.device, threads: int) -> dict[str, str]:
    """Return everything that the kernels' results depend on, by name."""
    found = {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
        "mkldnn": str(torch._C._has_mkldnn),
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        }
    return found


def differences(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{key} was {saved.get(key, 'not there')}, is {here.get(key, 'not there')}"
        for key in sorted({*saved, *here})
        if saved.get(key) != here.get(key)
    ]


def check(saved: Mapping[str, str], here: Mapping[str, str], whose: str) -> None:
    """Raise a PlatformError that names every difference, if there is one."""
    found = differences(saved, here)
    if found:
        raise PlatformError(
            f"{whose} would not compute the same bits as the run so far: {'; '.join(found)}",
            remedy="run where these agree, or continue without exactness: "
            'TrainConfig(mode="fast"), or a new run from the exported weights',
        )
