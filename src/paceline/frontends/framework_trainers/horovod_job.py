"""Horovod's job as this process sees it: its size, its ranks, and what all of them must agree on.

horovodrun starts the ranks and decides how many there are. A process that it has not started is a job of one
rank, unless another launcher has made it one of several: Horovod would not know of the others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, final

from paceline.comm.rendezvous.environment import find_launch_info
from paceline.core.errors import PlatformError, UsageError
from paceline.frontends.announcements import announce
from paceline.frontends.framework_trainers.chief_decisions import decided_by_chief
from paceline.frontends.framework_trainers.framework_run import FrameworkWorker
from paceline.frontends.framework_trainers.framework_settings import require_package

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

INSTALL = (
    "build it for this torch: HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation "
    "horovod==0.28.1, with C++17 in its two CMakeLists.txt (.ci/install-horovod of Paceline's repository "
    "does it); or train without it: paceline.PyTorchDDPTrainer"
)


@final
class HorovodJob:
    """The ranks that horovodrun started, or this process alone. `device`: where this rank trains, as long as
    its process lives."""

    def __init__(self, *, timeline: bool = False) -> None:
        self.hvd: Any = require_package("horovod.torch", INSTALL)
        version = require_package("horovod", INSTALL).__version__
        self.framework = f"horovod {version}"
        self.is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if timeline and self.hvd.is_initialized() and "HOROVOD_TIMELINE" not in os.environ:
            raise UsageError(
                "timeline= after hvd.init(): Horovod decides there whether it can write one",
                remedy="leave hvd.init() to HorovodTrainer, or use horovodrun --timeline-filename FILE",
            )
        if not self.hvd.is_initialized():
            if timeline:
                os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
            try:
                self.hvd.init()
            except Exception as error:
                raise PlatformError(
                    f"Horovod could not start: {type(error).__name__}: {error}",
                    remedy="start the script with horovodrun -np N --gloo; on one machine add "
                    "--network-interfaces lo",
                ) from error
        refuse_other_launchers(os.environ, self.size)
        self.device = device_of_rank(self.hvd)

    @property
    def rank(self) -> int:
        return int(self.hvd.rank())

    @property
    def size(self) -> int:
        return int(self.hvd.size())

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's record; after a loss another one may."""
        return self.rank == 0

    def workers(self) -> list[FrameworkWorker]:
        """Return all ranks' processes; every rank calls it."""
        mine = [self.rank, os.getpid(), socket.gethostname()]
        return [FrameworkWorker(*one) for one in self.hvd.allgather_object(mine, name="paceline.workers")]

    def agree(self, what: Mapping[str, Any]) -> None:
        """Refuse ranks whose settings differ, on all of them, by name: their collectives would not match, and
        Horovod would wait for ever."""
        gathered = self.hvd.allgather_object(dict(what), name="paceline.agree")
        for rank, theirs in enumerate(gathered):
            for name, value in gathered[0].items():
                if theirs.get(name) != value:
                    raise UsageError(
                        f"{name} is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank}: every rank "
                        "must make the same steps",
                        remedy="give all ranks the same model and settings, and data of the same length",
                    )

    def decided_by_chief(self, decide: Callable[[], T]) -> T:
        """Return what `decide` returns on the chief, on every rank."""
        return decided_by_chief(
            decide,
            self.is_chief,
            lambda found: self.hvd.broadcast_object(found, root_rank=0, name="paceline.decided"),
        )


def device_of_rank(hvd: Any) -> torch.device:
    """Return where this rank trains: on the GPU of its number on this host, or of what is left of that number
    where ranks share GPUs or see one each; on the CPU without a GPU, or without a Horovod that sums there."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu")
    if not (hvd.cuda_built() or hvd.rocm_built()):
        announce("Horovod was built without GPUs, and trains on the CPU: HOROVOD_GPU_OPERATIONS=NCCL has it")
        return torch.device("cpu")
    return torch.device("cuda", hvd.local_rank() % gpus)


def refuse_other_launchers(environment: Mapping[str, str], size: int) -> None:
    """Refuse a rank of a launcher that Horovod, whose job has `size` ranks, does not follow. Over MPI it
    follows mpirun, which it does not say before it has started."""
    if "HOROVOD_RANK" in environment or size > 1:
        return
    info = find_launch_info(environment)
    if info.world_size > 1:
        raise UsageError(
            f"this process is rank {info.rank} of {info.world_size} ({info.source}), of which Horovod knows "
            "nothing: each of them would train alone",
            remedy="start the script with horovodrun: horovodrun -np "
            f"{info.world_size} --gloo python SCRIPT; or use paceline.PyTorchDDPTrainer",
        )
