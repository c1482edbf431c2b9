"""A worker's machine shell with everything that it touches, and a client that is not connected."""

from __future__ import annotations

from pathlib import Path

from tests.control.member_driver import ME, PATIENCE, accepted, view

from paceline.comm.context import DistributedContext
from paceline.comm.cost import load_links
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.control.control_client import ControlClient
from paceline.control.member_state import OpenView, Restore, StateReady, Train
from paceline.control.messages import View
from paceline.control.worker_options import WorkerOptions
from paceline.train.member.machine_shell import MachineShell
from paceline.train.phases import Phases
from paceline.train.stop_signals import StopRequest
from paceline.train.team import Team


def alone() -> DistributedContext:
    return DistributedContext.from_transport(single_rank())


SECRET = b"s" * 32
ALONE: View = view(1, members=(ME,), restore=True)


class Worker:
    """A shell with everything that it touches."""

    def __init__(self, folder: Path | None = None, patience: float = PATIENCE, shards: int = 1) -> None:
        self.options = WorkerOptions(
            member=ME,
            address=("127.0.0.1", 1),
            secret=SECRET.hex(),
            patience=patience,
            links=load_links().to_plain(),
        )
        self.client = ControlClient(self.options.address, SECRET)
        self.team = Team(alone(), shards)
        self.phases, self.stop = Phases(), StopRequest()
        self.shell = MachineShell(self.options, self.client, self.team, self.phases, self.stop, folder)

    def close(self) -> None:
        """The group's memory goes with its last reference."""
        self.team.context.close()
        vars(self).clear()

    def in_view(self, first: View = ALONE) -> None:
        self.shell.feed(accepted())
        self.shell.feed(first)
        assert isinstance(self.shell.next_action(), OpenView)
        self.team.context.close()
        self.shell.install(alone(), first, may_back_up=True)
        assert isinstance(self.shell.next_action(), Restore)
        self.shell.feed(StateReady((0, 0, 0)))
        assert isinstance(self.shell.next_action(), Train)
