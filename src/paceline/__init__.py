"""Paceline trains models on many workers, and a failure leaves no trace.

This module only maps public names to the modules that hold them and loads each on first use, so that
`import paceline` costs milliseconds and never imports torch.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_MODULES = {
    "paceline.comm.compression": ("PowerSGD", "cast_gradients", "quantize_gradients", "sparsify_gradients"),
    "paceline.comm.context": ("DistributedContext",),
    "paceline.comm.ops": ("ReduceOp",),
    "paceline.core.errors": (
        "CommTimeoutError",
        "ConfigError",
        "DisagreementError",
        "InternalError",
        "PacelineError",
        "PeerError",
        "PeerLostError",
        "PlatformError",
        "RankFailedError",
        "RendezvousError",
        "ResourceError",
        "UnavailableError",
        "UsageError",
        "WireError",
    ),
    "paceline.frontends.process_group": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "destroy_process_group",
        "gather",
        "get_distributed_info",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "no_sync",
        "recv",
        "reduce_scatter",
        "scatter",
        "send",
    ),
    "paceline.frontends.spawn": ("spawn",),
    "paceline.parallel.ddp": ("DistributedDataParallel",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    # The next access finds it without coming here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
