"""`python -m paceline.launcher` is `paceline run`; and the launcher's public names, to import from here."""

from __future__ import annotations

import sys

from paceline.frontends.launcher.distributed_launcher import (
    DistributedLauncher as DistributedLauncher,
    launch_distributed_training as launch_distributed_training,
)
from paceline.frontends.launcher.launch_config import LaunchConfig as LaunchConfig

if __name__ == "__main__":
    from paceline.cli.main import run

    run(["run", *sys.argv[1:]])
