"""What launchers do with the other processes when one dies: some end them all, and nothing can be repaired.

Reads a mapping that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping


def why_survivors_end(environment: Mapping[str, str]) -> str:
    """Return why the launcher of this process ends the survivors of a failure, and what lets them live; empty
    where it lets them live, or is not known."""
    if environment.get("OMPI_COMM_WORLD_SIZE"):
        # Of Open MPI 4; version 5 hands over its options in the same way under another name.
        names = ("OMPI_MCA_orte_enable_recovery", "PRTE_MCA_prte_enable_recovery")
        if any(environment.get(name, "").lower() in ("1", "true", "yes") for name in names):
            return ""
        return "mpirun ends all processes when one dies: start it with mpirun --enable-recovery"
    if environment.get("TORCHELASTIC_RUN_ID"):
        return (
            "torchrun ends all processes when one dies, and starts them again: start them with paceline run"
        )
    if environment.get("SLURM_PROCID") and environment.get("SLURM_KILL_BAD_EXIT") == "1":
        return "srun ends all processes when one dies: start it with srun --kill-on-bad-exit=0"
    return ""
