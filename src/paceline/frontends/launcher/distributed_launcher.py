"""Start a script on every rank of a node: the front door behind `paceline run`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import final

from paceline.engines.local.script_ranks import ScriptRanks
from paceline.frontends.launcher.call_relay import CallRelay
from paceline.frontends.launcher.launch_config import LaunchConfig
from paceline.frontends.launcher.launch_program import Program
from paceline.frontends.launcher.launch_signals import listening
from paceline.frontends.launcher.master_port import free_port
from paceline.frontends.launcher.node_job import NodeJob
from paceline.frontends.launcher.node_meeting import JobMeeting, LoneNode, NodeMeeting


@final
class DistributedLauncher:
    """Starts a script on all ranks of a node.

    launcher = DistributedLauncher(LaunchConfig(nproc_per_node=4))
    code = launcher.launch("train.py", "--epochs", "3")
    """

    def __init__(self, config: LaunchConfig | None = None) -> None:
        self.config = config or LaunchConfig()

    def launch(self, script: str | os.PathLike[str], *args: object, module: bool = False) -> int:
        """Run a script, or with `module` what `python -m` would run, on every rank; return the exit code: 0,
        or that of the first rank that failed."""
        return self.run(Program(os.fspath(script), tuple(map(str, args)), is_module=module))

    def run(self, program: Program) -> int:
        """Run a program on every rank of this node; return the exit code."""
        program.check()
        config = self.config.counted()
        for stream in (sys.stdout, sys.stderr):
            # What was printed before must not appear after what the ranks print.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with ExitStack() as stack:
            signals = stack.enter_context(listening())
            calls = stack.enter_context(closing(CallRelay()))
            ranks = stack.enter_context(closing(ScriptRanks(calls.handle)))
            ranks.watch(signals.wake_read, signals.drain)
            meeting: JobMeeting
            if config.nnodes == 1:
                meeting = LoneNode(config, free_port)
            else:
                meeting = NodeMeeting(config, free_port, signals.wake)
            stack.enter_context(closing(meeting))
            return NodeJob(config, program, meeting, ranks, calls, signals).run()


def launch_distributed_training(
    script: str | os.PathLike[str],
    *args: object,
    nproc_per_node: int | str = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = LaunchConfig.master_addr,
    master_port: int | None = None,
    backend: str = "auto",
    max_restarts: int = 3,
    monitor_interval: float = 1.0,
    start_timeout: float = 600.0,
    script_args: Sequence[object] = (),
) -> int:
    """Run a script with these arguments, and those of `script_args` behind them, on every rank of this node;
    return the exit code."""
    config = LaunchConfig(
        nproc_per_node=nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        backend=backend,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        start_timeout=start_timeout,
    )
    return DistributedLauncher(config).launch(script, *args, *script_args)
