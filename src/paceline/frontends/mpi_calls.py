"""Trainings that the ranks of one mpirun make together, by a Trainer or the orchestrator: rank 0 trains, and
the other ranks are agents of its supervisor meanwhile.

    mpirun -n 4 python train.py        rank 0: supervisor, observers, an agent; ranks 1 to 3: an agent each

Workers are children of agents and not of mpirun: one that dies is replaced as anywhere. A rank that dies
takes its worker with it, and the others go on, where mpirun lets them live (--with-ft ulfm). Where rank 0
dies, its workers save, and another rank leads the call from there. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from paceline.comm.rendezvous.environment import find_launch_info
from paceline.comm.rendezvous.key_value_store import StoreClient
from paceline.comm.rendezvous.launcher_policies import why_survivors_end
from paceline.core.errors import PacelineError, UsageError
from paceline.core.host import host_name
from paceline.core.listen_address import ListenAddress
from paceline.core.wording import counted
from paceline.engines.engine import Engine
from paceline.engines.mpi import own_ranks
from paceline.engines.mpi.mpi_engine import Mpi
from paceline.frontends import overrides
from paceline.frontends.mpi_meeting import (
    AGENTS,
    LOOK_SECONDS,
    OUTCOME,
    LeadingRank,
    MeetingPlace,
    own_trouble,
    read_outcome,
)
from paceline.frontends.overrides import Overrides
from paceline.frontends.portable_errors import portable
from paceline.train.settings.train_config import TrainConfig, shards_on_ranks
from paceline.train.stop_signals import listening

T = TypeVar("T")
_log = logging.getLogger(__name__)


@final
class _LeaderLostError(Exception):
    """The rank that leads the call is gone."""


@final
@dataclass(eq=False)
class MpiRanks:
    """This process among the ranks of its mpirun. `calls` counts those that it has made; `folder`: of the run
    of the present call, where it is known."""

    place: MeetingPlace
    leads: bool
    calls: int = 0
    folder: str = ""
    _leading: LeadingRank | None = None

    @property
    def world_size(self) -> int:
        return 1 + len(self.place.others)

    def call_together(self, config: TrainConfig, compute: Callable[[], T]) -> T:
        """Make a call for all ranks if this one leads, else be an agent of it and return its result."""
        self.calls += 1
        self.folder = ""
        succeeds = False
        while not self.leads:
            try:
                ok, result = self._follow()
            except _LeaderLostError:
                self.leads = succeeds = self.place.claim(self.calls)
                continue
            if not ok:
                raise result
            return result  # type: ignore[no-any-return]
        return self._lead(config, compute, succeeds)

    def announce_folder(self, folder: str) -> None:
        """Note where the call keeps its run: a rank that succeeds this one goes on with it."""
        if self._leading is not None:
            self._leading.folder = folder

    def _lead(self, config: TrainConfig, compute: Callable[[], T], succeeds: bool) -> T:
        if self.calls == 1 and not succeeds and (reason := why_survivors_end(self.place.environment)):
            _log.warning("a rank that dies ends this run, which then continues from a checkpoint: %s", reason)
        with LeadingRank(self.place, self.calls) as leading, own_ranks.waiting(leading):
            self._leading = leading
            try:
                if succeeds:
                    leading.await_survivors()
                    where = f" in {self.folder}" if self.folder else ""
                    _log.warning("rank %d leads from now on, and continues the run%s", self.place.rank, where)
                result = self._computed(config, compute)
            except BaseException as error:
                # What ends one rank ends them all alike.
                leading.publish(portable(error), ok=False)
                raise
            finally:
                self._leading = None
            leading.publish(result, ok=True)
            return result

    def _computed(self, config: TrainConfig, compute: Callable[[], T]) -> T:
        now = overrides.current()
        settings = _settings(now.apply(config), self.world_size, self.folder)
        self._check_size(now)
        with overrides.in_force(now.with_final(settings)):
            return compute()

    def _check_size(self, chosen: Overrides) -> None:
        """Refuse options that ask for another number of workers than mpirun has started ranks. A file of
        settings may: the size of an engine wins over it."""
        workers, ranks = replace(chosen, file=None).workers, self.place.world_size
        if workers not in (None, ranks, self.world_size):
            raise UsageError(
                f"workers={workers} under mpirun with {counted(ranks, 'rank')}: each rank has one worker",
                remedy=f"leave --workers, --num-gpus and --nodes out, or start mpirun -n {workers}",
            )

    def _follow(self) -> tuple[bool, Any]:
        """Return the result of the leading rank's call, or False and its error."""
        rank = self.place.rank
        # Signals are mpirun's: it sends them to every rank, and the one that leads stops the run.
        with (
            listening(lambda reason: None, ctrl_c=True),
            contextlib.closing(self.place.connect(self.calls)) as store,
        ):
            try:
                store.set_at_end(f"gone/{rank}")
                store.set(f"host/{rank}", host_name(self.place.environment))
                has_helped = False
                while not store.await_keys([OUTCOME], LOOK_SECONDS, [] if has_helped else [AGENTS]):
                    if not has_helped and store.check([AGENTS]):
                        has_helped = True
                        self._be_agent(store)
                result = read_outcome(store)
                store.set(f"read/{rank}", b"")
                return result
            except OSError as error:
                raise _LeaderLostError from error

    def _be_agent(self, store: StoreClient) -> None:
        from paceline.elastic.supervisor.agent import Agent

        address, secret, self.folder = own_ranks.decode_call(store.get(AGENTS) or b"")
        rank, said = self.place.rank, list[str]()
        policy = ListenAddress.from_environment(self.place.environment)
        store.set(f"agent/{rank}", b"")
        try:
            with own_trouble("its agent cannot run"):
                code = Agent(address, secret, 1, say=said.append, listening=policy).run()
        except PacelineError as error:
            code = 1
            said.append(error.message)
        reason = "" if code == 0 else f"rank {rank}: {' | '.join(said[-2:])}"
        store.set(f"ended/{rank}", json.dumps({"code": code, "reason": reason}))


def current() -> MpiRanks | None:
    """Return this process's place among the ranks of its mpirun; None outside of mpirun, for one rank, and in
    processes that a rank forked."""
    if not _found:
        _found.append((os.getpid(), _find(os.environ)))
    owner, ranks = _found[0]
    return ranks if owner == os.getpid() else None


_found: list[tuple[int, MpiRanks | None]] = []


def announce_folder(folder: str) -> None:
    """Note where the run is that this rank has prepared, where it leads a call."""
    ranks = current()
    if ranks is not None:
        ranks.announce_folder(folder)


def _find(environment: Mapping[str, str]) -> MpiRanks | None:
    if not environment.get("OMPI_COMM_WORLD_SIZE"):
        return None
    # With an address: ranks of several hosts are found by other means here than those of a group.
    launcher = find_launch_info({**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    if launcher.source != "OpenMPI" or launcher.world_size == 1:
        return None
    namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "openmpi")
    on_one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(launcher.world_size)
    place = MeetingPlace(launcher.rank, launcher.world_size, on_one_host, namespace, environment)
    return MpiRanks(place, leads=launcher.rank == 0)


def _settings(config: TrainConfig, ranks: int, folder: str) -> dict[str, Any]:
    """Return the settings that win over the script's own and those of the command line. `folder`: of the run
    that a rank has begun which is gone; empty for none."""
    name = config.engine.name if isinstance(config.engine, Engine) else "mpi"
    if name != "mpi":
        raise UsageError(
            f"engine={name} under mpirun, whose ranks are the nodes",
            remedy="leave the engine out, or start the script without mpirun",
        )
    chosen = {"engine": Mpi(), "workers": ranks}
    if folder:
        return {**chosen, "run_dir": folder, "resume": "auto"}
    shards = shards_on_ranks(config, ranks)
    return chosen if shards is None else {**chosen, "shards": shards}
