"""Calls of a Trainer that the ranks of one mpirun make together: rank 0 makes the call, and the other ranks
are agents of its supervisor meanwhile.

    mpirun -n 4 python train.py        rank 0: supervisor, observers, an agent; ranks 1 to 3: an agent each

Workers are children of agents and not of mpirun: one that dies is replaced as anywhere. A rank that dies
takes its worker with it, and the others go on, where mpirun lets them live (--with-ft ulfm).

The ranks of a call meet at a store that rank 0 serves (comm/rendezvous/key_value_store.py) for the time of
the call, at a port of its own. Where it is, and the secret for it, is in a file that only this user can read:
in mpirun's own folder where all ranks are on one host, else in the user's folder for state, which hosts
share. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar, final

from paceline.comm import tensor_pickling
from paceline.comm.rendezvous.environment import find_launch_info
from paceline.comm.rendezvous.key_value_store import MAX_VALUE, StoreClient, StoreServer
from paceline.comm.rendezvous.launcher_policies import why_survivors_end
from paceline.core.atomic_file import replace_file
from paceline.core.errors import PacelineError, PeerLostError, RendezvousError, UsageError
from paceline.core.host import host_name
from paceline.core.listen_address import ListenAddress
from paceline.core.reachable_address import address_towards, own_address
from paceline.core.sandbox_fallbacks import memory_file
from paceline.core.untrusted import is_owned_by_user, read_regular
from paceline.engines.engine import Engine, NodeStatus
from paceline.engines.local import memfd_pickle
from paceline.engines.mpi import own_ranks
from paceline.engines.mpi.settings import Mpi
from paceline.frontends import overrides
from paceline.frontends.portable_errors import portable
from paceline.train.settings.train_config import TrainConfig, shards_on_ranks
from paceline.train.stop_signals import listening

T = TypeVar("T")
_log = logging.getLogger(__name__)

_MEET_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.5
_ANSWER_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.02
_MOST_STORED: Final = 1 << 40
_AGENTS, _OUTCOME = "agents", "outcome"


@final
@dataclass(eq=False)
class MpiRanks:
    """This process among the ranks of its mpirun; `calls` counts those that it has made."""

    rank: int
    world_size: int
    on_one_host: bool
    namespace: str
    environment: Mapping[str, str] = field(repr=False)
    calls: int = 0

    def call_together(self, config: TrainConfig, compute: Callable[[], T]) -> T:
        """Make a call for all ranks on rank 0, else be an agent of it and return its result."""
        self.calls += 1
        if self.rank == 0:
            return self._lead(config, compute)
        ok, result = self._follow()
        if not ok:
            raise result
        return result  # type: ignore[no-any-return]

    def _lead(self, config: TrainConfig, compute: Callable[[], T]) -> T:
        if self.calls == 1 and (reason := why_survivors_end(self.environment)):
            _log.warning("a rank that dies ends this run, which then continues from a checkpoint: %s", reason)
        with _LeadingRank(self) as leading, own_ranks.waiting(leading):
            now = overrides.current()
            settings = {**_settings(config, self.world_size), **now.options}
            try:
                with overrides.in_force(replace(now, options=settings)):
                    result = compute()
            except BaseException as error:
                # What ends one rank ends them all alike.
                leading.publish(portable(error), ok=False)
                raise
            leading.publish(result, ok=True)
            return result

    def _follow(self) -> tuple[bool, Any]:
        """Return the result of rank 0's call, or False and its error."""
        # Signals are mpirun's: it sends them to every rank, and the one that leads stops the run.
        with listening(lambda reason: None, ctrl_c=True), contextlib.closing(self._connect()) as store:
            try:
                store.set_at_end(f"gone/{self.rank}")
                store.set(f"host/{self.rank}", host_name(self.environment))
                while not store.await_keys([_OUTCOME], _LOOK_SECONDS, [_AGENTS]):
                    if not store.check([_AGENTS]):
                        continue
                    self._be_agent(store)
                    while not store.await_keys([_OUTCOME], _LOOK_SECONDS):
                        pass
                result = _read_outcome(store)
                store.set(f"read/{self.rank}", b"")
                return result
            except OSError as error:
                raise self._lost_leader() from error

    def _be_agent(self, store: StoreClient) -> None:
        from paceline.elastic.supervisor.agent import Agent

        address, secret = own_ranks.decode_call(store.get(_AGENTS) or b"")
        said: list[str] = []
        agent = Agent(
            address, secret, 1, say=said.append, listening=ListenAddress.from_environment(self.environment)
        )
        store.set(f"agent/{self.rank}", b"")
        try:
            code = agent.run()
        except PacelineError as error:
            code = 1
            said.append(error.message)
        reason = "" if code == 0 else f"rank {self.rank}: {' | '.join(said[-2:])}"
        store.set(f"ended/{self.rank}", json.dumps({"code": code, "reason": reason}))

    def _connect(self) -> StoreClient:
        """Connect to the store of this call as soon as rank 0 serves it."""
        deadline = time.monotonic() + _MEET_SECONDS
        while True:
            where = _read_meeting(self._file())
            if where is not None and where["call"] == self.calls:
                with contextlib.suppress(OSError, PacelineError):
                    secret = bytes.fromhex(str(where["secret"]))
                    host, port = str(where["host"]), int(where["port"])
                    return StoreClient(host, port, _ANSWER_SECONDS, secret=secret)
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {self.rank} waits for call {self.calls} of rank 0, and {self._file()} does not "
                    f"name it after {_MEET_SECONDS:g} s",
                    remedy="have every rank make the same calls; on several hosts, let that folder be shared "
                    "(-x XDG_STATE_HOME=/shared/folder)",
                )
            time.sleep(_RETRY_SECONDS)

    def _lost_leader(self) -> PeerLostError:
        return PeerLostError(
            "rank 0, which leads the run, is gone",
            rank=0,
            remedy='start again with resume="auto" to continue',
        )

    def _file(self) -> Path:
        """Return where rank 0 says how the others reach it."""
        base = Path(self.environment.get("PMIX_SERVER_TMPDIR", ""))
        if self.on_one_host and base.is_absolute() and base.is_dir() and is_owned_by_user(base):
            return base / f"paceline-{os.geteuid()}.json"
        state = self.environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state) / "paceline" / "mpi" / f"{self.namespace.replace('/', '_')}.json"


def current() -> MpiRanks | None:
    """Return this process's place among the ranks of its mpirun; None outside of mpirun, for one rank, and in
    processes that a rank forked."""
    if not _found:
        _found.append((os.getpid(), _find(os.environ)))
    owner, ranks = _found[0]
    return ranks if owner == os.getpid() else None


_found: list[tuple[int, MpiRanks | None]] = []


def _find(environment: Mapping[str, str]) -> MpiRanks | None:
    if not environment.get("OMPI_COMM_WORLD_SIZE"):
        return None
    # Without an address: ranks of several hosts are found by other means here than those of a group.
    size, rank, local = (
        environment.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("SIZE", "RANK", "LOCAL_SIZE")
    )
    launcher = find_launch_info({**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    if launcher.source != "OpenMPI" or launcher.world_size == 1:
        return None
    namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "openmpi")
    return MpiRanks(int(rank), int(size), size == local, namespace, environment)


def _settings(config: TrainConfig, ranks: int) -> dict[str, Any]:
    """Return the settings that win over the script's own."""
    name = config.engine.name if isinstance(config.engine, Engine) else "mpi"
    if name != "mpi":
        raise UsageError(
            f"engine={name} under mpirun, whose ranks are the nodes",
            remedy="leave the engine out, or start the script without mpirun",
        )
    shards = shards_on_ranks(config, ranks)
    chosen = {"engine": Mpi(), "workers": ranks}
    return chosen if shards is None else {**chosen, "shards": shards}


@final
class _LeadingRank:
    """Rank 0 while it makes a call: serves the store, calls the others as agents, hands out the result."""

    def __init__(self, ranks: MpiRanks) -> None:
        self._ranks = ranks
        self.world_size = ranks.world_size
        self._others = range(1, ranks.world_size)
        self._policy = ListenAddress.from_environment(ranks.environment)
        self._file = ranks._file()
        secret = secrets.token_bytes(32)
        listener = self._policy.open(self.address())
        host, port = listener.getsockname()[:2]
        self._server = StoreServer(listener, secret, max_stored=_MOST_STORED)
        self._store = StoreClient(host, port, _ANSWER_SECONDS, secret=secret)
        meeting = {"call": ranks.calls, "host": host, "port": port, "secret": secret.hex()}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, json.dumps(meeting).encode(), mode=0o600)

    def __enter__(self) -> _LeadingRank:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.unlink(missing_ok=True)
        self._store.close()
        self._server.close()

    def address(self) -> str:
        if self._ranks.on_one_host and not self._policy.interface:
            return "127.0.0.1"
        master = self._ranks.environment.get("MASTER_ADDR", "")
        if master and not self._policy.interface:
            return address_towards(master)
        return own_address(self._policy.interface)

    def call_agents(self, address: tuple[str, int], secret: bytes) -> None:
        self._store.set(_AGENTS, own_ranks.encode_call(address, secret))

    def statuses(self) -> list[NodeStatus]:
        names = ("host", "agent", "ended", "gone")
        values = self._store.multi_get([f"{name}/{rank}" for rank in self._others for name in names])
        return [
            _status(rank, *values[number : number + len(names)])
            for rank, number in zip(self._others, range(0, len(values), len(names)), strict=True)
        ]

    def publish(self, result: object, *, ok: bool) -> None:
        """Hand the result, or the error, to the other ranks that live; wait until they have it."""
        file = memfd_pickle.dump(result, reducers=tensor_pickling.reducers())
        try:
            size = os.fstat(file).st_size
            chunks = range(0, size, MAX_VALUE)
            for number, offset in enumerate(chunks):
                self._store.set(f"{_OUTCOME}/{number}", os.pread(file, MAX_VALUE, offset))
        finally:
            os.close(file)
        self._store.set(_OUTCOME, json.dumps({"chunks": len(chunks), "ok": ok}))
        deadline = time.monotonic() + _MEET_SECONDS
        for rank in self._others:
            # One that died before it came is not waited for longer than one that is slow.
            while not self._store.await_keys([f"read/{rank}"], _LOOK_SECONDS, [f"gone/{rank}"]):
                if self._store.check([f"gone/{rank}"]) or time.monotonic() > deadline:
                    _log.warning("rank %d is gone, and the others go on without it", rank)
                    break


def _status(
    rank: int, host: bytes | None, agent: bytes | None, ended: bytes | None, gone: bytes | None
) -> NodeStatus:
    name = (host or b"").decode()
    if gone is not None:
        return NodeStatus(rank, "lost", name, reason=f"rank {rank} of mpirun is gone")
    if ended is not None:
        plain = json.loads(ended)
        return NodeStatus(rank, "ended", name, int(plain["code"]), str(plain["reason"]))
    if agent is not None:
        return NodeStatus(rank, "running", name)
    return NodeStatus(rank, "pending", name, reason=f"rank {rank} has not come to this call")


def _read_outcome(store: StoreClient) -> tuple[bool, Any]:
    head = json.loads(store.get(_OUTCOME) or b"")
    file = memory_file("paceline-outcome")
    try:
        for number in range(int(head["chunks"])):
            data = store.get(f"{_OUTCOME}/{number}") or b""
            os.pwrite(file, data, number * MAX_VALUE)
        return bool(head["ok"]), memfd_pickle.load(file)
    finally:
        os.close(file)


def _read_meeting(file: Path) -> dict[str, Any] | None:
    """Return where rank 0 is; None where it has not said so, and where the file is not this user's."""
    try:
        if not is_owned_by_user(file):
            return None
        plain = json.loads(read_regular(file))
    except (OSError, ValueError):
        return None
    return plain if isinstance(plain, dict) else None
