"""The environment of a rank: what torchrun sets, and nothing of the launcher's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from paceline.comm.rendezvous.environment import BACKEND_VARIABLE
from paceline.frontends.launcher.launch_config import LaunchConfig
from paceline.frontends.launcher.launch_signals import STOP_SIGNALS

# Of a launcher around this one: its ranks are not ours.
_OTHERS: Final = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


@final
@dataclass(frozen=True)
class Placement:
    """Place of this node's ranks in one start of the job. `first_rank`: of this node. `attempt` counts the
    starts from 0."""

    host: str
    port: int
    first_rank: int
    world_size: int
    attempt: int = 0


def rank_environment(
    around: Mapping[str, str], config: LaunchConfig, place: Placement, local_rank: int
) -> dict[str, str]:
    """Return the environment of one rank; `around` is the launcher's."""
    rank = str(place.first_rank + local_rank)
    variables = {name: value for name, value in around.items() if name not in _OTHERS}
    variables |= {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(config.ranks_here),
        "GROUP_RANK": str(config.node_rank),
        "GROUP_WORLD_SIZE": str(config.nnodes),
        "ROLE_NAME": config.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        # The ranks' store is rank 0's, not the launcher's.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # No file: errors reach the launcher through the fork server. As torchrun without log files has it.
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in STOP_SIGNALS),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": around.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if config.ranks_here > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    if config.backend != "auto":
        variables[BACKEND_VARIABLE] = config.backend
    return variables
