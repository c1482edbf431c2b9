"""Where the ranks of one mpirun meet for a call: a store that the leading rank serves for its time.

Where the store is, and the secret for it, is in a file that only this user can read: in mpirun's own folder
where all ranks are on one host, else in the user's folder for state, which hosts share. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from paceline.comm import tensor_pickling
from paceline.comm.rendezvous.key_value_store import MAX_VALUE, StoreClient, StoreServer
from paceline.core.atomic_file import create_once, replace_file
from paceline.core.errors import PacelineError, RendezvousError, ResourceError
from paceline.core.listen_address import ListenAddress
from paceline.core.reachable_address import address_towards, own_address
from paceline.core.sandbox_fallbacks import memory_file
from paceline.core.untrusted import is_owned_by_user, read_regular
from paceline.engines.engine import NodeStatus
from paceline.engines.local import memfd_pickle
from paceline.engines.mpi import own_ranks

_log = logging.getLogger(__name__)

MEET_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 0.5
_ANSWER_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.02
_SURVIVORS_SECONDS: Final = 15.0  # within which the others notice that the leading rank is gone
_MOST_STORED: Final = 1 << 40
AGENTS, OUTCOME = "agents", "outcome"


@final
@dataclass(eq=False)
class MeetingPlace:
    """This process's place among the ranks of its mpirun. `term` counts the ranks that have led, `leader` is
    the one of this term; `lost`: ranks that are known to be gone."""

    rank: int
    world_size: int
    on_one_host: bool
    namespace: str
    environment: Mapping[str, str] = field(repr=False)
    term: int = 0
    leader: int = 0
    lost: set[int] = field(default_factory=set)

    @property
    def others(self) -> list[int]:
        """The other ranks that may be alive."""
        return [rank for rank in range(self.world_size) if rank != self.rank and rank not in self.lost]

    def connect(self, call: int) -> StoreClient:
        """Connect to the store of a call as soon as the leading rank serves it."""
        deadline = time.monotonic() + MEET_SECONDS
        while True:
            where = _read_meeting(self.file())
            if where is not None and (where["call"], where["term"]) == (call, self.term):
                self.leader = int(where["rank"])
                with contextlib.suppress(OSError, PacelineError):
                    secret = bytes.fromhex(str(where["secret"]))
                    return StoreClient(str(where["host"]), int(where["port"]), _ANSWER_SECONDS, secret=secret)
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {self.rank} waits for call {call} of the rank that leads, and {self.file()} does "
                    f"not name it after {MEET_SECONDS:g} s",
                    remedy="have every rank make the same calls; on several hosts, let that folder be shared "
                    "(-x XDG_STATE_HOME=/shared/folder)",
                )
            time.sleep(_RETRY_SECONDS)

    def claim(self, call: int) -> bool:
        """Try to lead the next term, whose leading rank is gone; one rank can."""
        self.lost.add(self.leader)
        self.term += 1
        path = self.file().with_suffix(f".{call}.{self.term}")
        path.parent.mkdir(parents=True, exist_ok=True)
        create_once(path, str(self.rank).encode(), mode=0o600)
        return path.read_text() == str(self.rank)

    def address(self) -> str:
        """Return the address at which the other ranks reach this one."""
        policy = ListenAddress.from_environment(self.environment)
        if self.on_one_host and not policy.interface:
            return "127.0.0.1"
        master = self.environment.get("MASTER_ADDR", "")
        if master and not policy.interface and self.rank == 0:
            return address_towards(master)
        return own_address(policy.interface)

    def file(self) -> Path:
        """Return where the leading rank says how the others reach it."""
        base = Path(self.environment.get("PMIX_SERVER_TMPDIR", ""))
        if self.on_one_host and base.is_absolute() and base.is_dir() and is_owned_by_user(base):
            return base / f"paceline-{os.geteuid()}.json"
        state = self.environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state) / "paceline" / "mpi" / f"{self.namespace.replace('/', '_')}.json"


@final
class LeadingRank:
    """The rank that makes a call: serves the store, calls the others as agents, hands out the result."""

    def __init__(self, place: MeetingPlace, call: int) -> None:
        self._place, self._call = place, call
        self.folder = ""
        self._file = place.file()
        secret = secrets.token_bytes(32)
        listener = ListenAddress.from_environment(place.environment).open(place.address())
        host, port = listener.getsockname()[:2]
        self._server = StoreServer(listener, secret, max_stored=_MOST_STORED)
        self._store = StoreClient(host, port, _ANSWER_SECONDS, secret=secret)
        meeting = {
            "call": call,
            "term": place.term,
            "rank": place.rank,
            "host": host,
            "port": port,
            "secret": secret.hex(),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, json.dumps(meeting).encode(), mode=0o600)

    def __enter__(self) -> LeadingRank:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.unlink(missing_ok=True)
        self._store.close()
        self._server.close()

    @property
    def world_size(self) -> int:
        """How many ranks live, this one included."""
        return 1 + len(self._place.others)

    def address(self) -> str:
        return self._place.address()

    def await_survivors(self) -> None:
        """Wait for those that lost their leading rank as this one did; who does not come is lost too."""
        self._store.await_keys([f"host/{rank}" for rank in self._place.others], _SURVIVORS_SECONDS)
        self._place.lost |= {rank for rank in self._place.others if not self._store.check([f"host/{rank}"])}

    def call_agents(self, address: tuple[str, int], secret: bytes) -> None:
        self._store.set(AGENTS, own_ranks.encode_call(address, secret, self.folder))

    def statuses(self) -> list[NodeStatus]:
        names, others = ("host", "agent", "ended", "gone"), self._place.others
        values = self._store.multi_get([f"{name}/{rank}" for rank in others for name in names])
        groups = [values[number : number + len(names)] for number in range(0, len(values), len(names))]
        # Nodes are counted from 1 on, without the ranks that were lost before.
        return [
            _status(node, rank, *group)
            for node, (rank, group) in enumerate(zip(others, groups, strict=True), 1)
        ]

    def publish(self, result: object, *, ok: bool) -> None:
        """Hand the result, or the error, to the other ranks that live; wait until they have it."""
        file = memfd_pickle.dump(result, reducers=tensor_pickling.reducers())
        try:
            size = os.fstat(file).st_size
            chunks = range(0, size, MAX_VALUE)
            for number, offset in enumerate(chunks):
                self._store.set(f"{OUTCOME}/{number}", os.pread(file, MAX_VALUE, offset))
        finally:
            os.close(file)
        self._store.set(OUTCOME, json.dumps({"chunks": len(chunks), "ok": ok}))
        deadline = time.monotonic() + MEET_SECONDS
        for rank in self._place.others:
            # One that died before it came is not waited for longer than one that is slow.
            while not self._store.await_keys([f"read/{rank}"], LOOK_SECONDS, [f"gone/{rank}"]):
                if self._store.check([f"gone/{rank}"]) or time.monotonic() > deadline:
                    _log.warning("rank %d is gone, and the others go on without it", rank)
                    self._place.lost.add(rank)
                    break


def _status(
    node: int, rank: int, host: bytes | None, agent: bytes | None, ended: bytes | None, gone: bytes | None
) -> NodeStatus:
    name = (host or b"").decode()
    if gone is not None:
        return NodeStatus(node, "lost", name, reason=f"rank {rank} of mpirun is gone")
    if ended is not None:
        plain = json.loads(ended)
        return NodeStatus(node, "ended", name, int(plain["code"]), str(plain["reason"]))
    if agent is not None:
        return NodeStatus(node, "running", name)
    return NodeStatus(node, "pending", name, reason=f"rank {rank} has not come to this call")


def read_outcome(store: StoreClient) -> tuple[bool, Any]:
    """Return the result of the leading rank's call, or False and its error."""
    head = json.loads(store.get(OUTCOME) or b"")
    what = "the outcome of a call of all ranks cannot be read here"
    with own_trouble(what):
        file = memory_file("paceline-outcome")
    try:
        for number in range(int(head["chunks"])):
            data = store.get(f"{OUTCOME}/{number}") or b""
            with own_trouble(what):
                os.pwrite(file, data, number * MAX_VALUE)
        with own_trouble(what):
            return bool(head["ok"]), memfd_pickle.load(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def own_trouble(what: str) -> Iterator[None]:
    """Raise a ResourceError for an OSError of this rank's own doing: one of the store says that the leading
    rank is gone."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{what}: {error}") from error


def _read_meeting(file: Path) -> dict[str, Any] | None:
    """Return where rank 0 is; None where it has not said so, and where the file is not this user's."""
    try:
        if not is_owned_by_user(file):
            return None
        plain = json.loads(read_regular(file))
    except (OSError, ValueError):
        return None
    return plain if isinstance(plain, dict) else None
