"""What launchers do with the other processes when one dies: some end them all, and nothing can be repaired.

Reads a mapping that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping


def why_survivors_end(environment: Mapping[str, str]) -> str:
    """Return why the launcher of this process ends the survivors of a failure, and what lets them live; empty
    where it lets them live, or is not known."""
    if environment.get("OMPI_COMM_WORLD_SIZE"):
        # Of Open MPI 4; version 5 hands over its options in the same way under other names. The last is set
        # by --with-ft ulfm; --enable-recovery of version 5 works, and leaves no trace here.
        names = ("OMPI_MCA_orte_enable_recovery", "PRTE_MCA_prte_enable_recovery", "OMPI_MCA_mpi_ft_enable")
        if any(environment.get(name, "").lower() in ("1", "true", "yes") for name in names):
            return ""
        option = "--with-ft ulfm" if environment.get("PRTE_LAUNCHED") else "--enable-recovery"
        return f"mpirun ends all processes when one dies: start it with mpirun {option}"
    if environment.get("TORCHELASTIC_RUN_ID"):
        return (
            "torchrun ends all processes when one dies, and starts them again: start them with paceline run"
        )
    if environment.get("SLURM_PROCID") and environment.get("SLURM_KILL_BAD_EXIT") == "1":
        return "srun ends all processes when one dies: start it with srun --kill-on-bad-exit=0"
    return ""
