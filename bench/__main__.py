"""Runs every benchmark and writes bench/results/. A benchmark that cannot run here says why and the others
go on.
"""

from __future__ import annotations

import importlib
import sys

from paceline.core.errors import PacelineError, UnavailableError

MODULES = (
    "all_reduce",
    "canonical",
    "counts",
    "network",
    "links",
    "disagreement",
    "spawn_latency",
    "orchestrator_start",
    "launcher",
    "tuner",
    "cycles",
    "seek",
    "same_bits",
    "train_speed",
    "default_shards",
    "torch_backend",
    "slurm_start",
    "checkpoint_stall",
    "tracker_cost",
    "recovery.paceline_kills",
    "recovery.against_peers",
    "recovery.steady_state",
    "recovery.many_workers",
    "recovery.matrix",
    "recovery.soak",
    "ray_recovery",
    "gpu",
    "gpu_bits",
)


def main() -> int:
    asked = sys.argv[1:] or MODULES
    names = [name for one in asked for name in MODULES if name == one or name.startswith(f"{one}.")] or asked
    failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            report = importlib.import_module(f"bench.{name}").run()
        except UnavailableError as error:
            print(f"not run: {error}")
            continue
        except PacelineError as error:
            failed += 1
            print(f"failed: {error}", file=sys.stderr)
            continue
        report.show()
        report.save()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
