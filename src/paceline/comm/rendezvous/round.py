"""One rendezvous of ranks: through a small key-value store that rank 0 serves (or torchrun's agent, or an
existing group has).

Every rank claims its number and says hello; a rank that waits names the missing ranks in the log, and when
it gives up. A failure is published in the store too, so that all ranks stop with the same reason. Data is
JSON. Waits end when what they wait for comes, not at the next turn of asking. The store lives only until
the group stands: rank 0 closes it, and the address is free for the next group.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from paceline.comm.rendezvous.environment import SECRET_VARIABLE, Address
from paceline.comm.rendezvous.key_value_store import StoreClient, StoreServer
from paceline.comm.transport.tcp.dial import MAX_PAUSE, Deadline, Look, no_check
from paceline.core.errors import GroupInterruptedError, RendezvousError, WireError
from paceline.core.handshake import KeyedDifferentlyError, VersionError
from paceline.core.listen_address import (
    ANY_PORT,
    INTERFACE_VARIABLE,
    ListenAddress,
    local_address,
    resolves_to_loopback,
)
from paceline.core.process_state import start_time
from paceline.core.wording import counted, ranks

T = TypeVar("T")

_log = logging.getLogger("paceline.comm")

_ANSWER_SECONDS = 10.0
_LOOK_AROUND_SECONDS = 0.5
_ASK_SECONDS = 0.1
_BAD, _FINISHED = "bad", "finished"


class StoreGoneError(Exception):
    """The store went away before the group was complete: rank 0 ended, or it was an earlier group's."""


def serve(
    address: Address, listening: ListenAddress = ANY_PORT, secret: bytes = b""
) -> tuple[StoreServer, Address]:
    """Serve rank 0's store at `address`; return it and where rank 0 itself reaches it. Only this machine can
    reach it where the address is a loopback one."""
    try:
        listener = _listener(address, listening)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot serve at {address}: {error.strerror or error}",
            remedy="another program, group or rank 0 is there: choose another port (address= or MASTER_PORT)",
        ) from error
    own = Address(*local_address(listener))
    return StoreServer(listener, secret), own


def _listener(address: Address, listening: ListenAddress) -> socket.socket:
    if listening.interface or address.is_loopback:
        return listening.open(address.host, address.port)
    loopback = resolves_to_loopback(address.host)
    if not loopback:
        try:
            return listening.open(address.host, address.port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    # The other hosts know this one by an address that it does not have itself (/etc/hosts with 127.0.1.1, a
    # service's address, port forwarding): only a listener on all interfaces is found there.
    _log.warning(
        "rank 0 listens on all interfaces: %s is %s here; %s=ADDRESS chooses one",
        address.host,
        loopback or "no address of this machine",
        INTERFACE_VARIABLE,
    )
    return listening.open("", address.port)


def connect(
    rank: int,
    address: Address,
    deadline: float,
    *,
    secret: bytes = b"",
    look: Look | None = None,
    first: int = 0,
) -> StoreClient:
    """Connect to the store at `address` as soon as rank 0 serves there; `look` is called meanwhile."""
    answer = _ANSWER_SECONDS if look is None else max(deadline - time.monotonic(), 0.1)

    def client() -> StoreClient:
        if look is not None:
            look()
        return StoreClient(address.host, address.port, answer, secret=secret, look=look)

    return _patiently(rank, address, deadline, client, first)


def connect_to_agent(rank: int, address: Address, deadline: float) -> Store:
    """Connect a client of the store that torchrun's agent serves."""
    # Generous: torch's store asks the name service for the names of both ends, which may take its time.
    limit = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
    client = partial(
        TCPStore, address.host, address.port, is_master=False, wait_for_workers=False, timeout=limit
    )
    return _patiently(rank, address, deadline, client)


def _patiently(rank: int, address: Address, deadline: float, attempt: Callable[[], T], first: int = 0) -> T:
    limit = Deadline(deadline)
    while True:
        try:
            return attempt()
        except ConnectionRefusedError:
            reason = "nothing listens there yet"
        except socket.gaierror as error:
            reason = f"that name is not known here ({error.strerror})"
        except OSError as error:
            reason = f"it cannot be reached ({error.strerror or error})"
        except KeyedDifferentlyError as error:
            raise RendezvousError(
                f"rank {rank} does not agree with rank {first} at {address} on having a secret: "
                f"{error.message}",
                remedy=f"set {SECRET_VARIABLE} on all ranks, or on none",
            ) from error
        except VersionError as error:
            raise RendezvousError(
                f"rank {rank} cannot meet rank {first} at {address}: {error.message}", remedy=error.remedy
            ) from error
        except (WireError, DistError):
            reason = "what listens there is not a rendezvous, or its secret is another"
        limit.pause(partial(str, f"rank {rank} waits for rank {first} at {address}: {reason}"))


@dataclass(eq=False)
class RendezvousRound:
    """One rank's part in one rendezvous; a context manager that publishes the rank's failure to all."""

    store: StoreClient | Store
    rank: int
    world_size: int
    deadline: float
    where: str
    _: KW_ONLY
    prefix: str = ""
    cancel: Look = no_check
    labels: Sequence[int] = ()  # empty: the ranks
    _asked: float = field(default=0.0, init=False)
    _host: object = field(default=None, init=False)
    # Processes of ranks on this host that have come.
    _neighbours: dict[int, int] = field(default_factory=dict, init=False)
    _looked_around: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.labels = self.labels or range(self.world_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, StoreGoneError):
            return
        try:
            if not self.store.check([self._key(_BAD)]):
                news = f"{type(error).__name__}: {error}"
                if isinstance(error, RendezvousError):
                    news = str(error.message)
                self.store.set(self._key(_BAD), json.dumps({"rank": self.labels[self.rank], "text": news}))
            # The other ranks look every few hundredths of a second; rank 0 takes the store with it.
            # The supervisor that interrupts one rank interrupts the others too.
            if self.rank == 0 and not isinstance(error, GroupInterruptedError):
                time.sleep(10 * MAX_PAUSE)
        except (DistError, OSError, GroupInterruptedError):
            _log.debug("no rank left to hear that rank %d gave up", self.labels[self.rank])

    def _key(self, name: str) -> str:
        return self.prefix + name

    def enter(self, hello: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Claim this rank's number, publish its hello, and return those of all ranks."""
        # The round in this store may be over and its server about to close: a rank that enters now belongs
        # to the next round, and its caller tries again as if the store had gone already.
        if self._has(_FINISHED):
            raise StoreGoneError
        # `add` is atomic in the store: of two processes with one number exactly one sees 1. The claim comes
        # before the hello, so that the second process never overwrites the hello of the first.
        taken = self._ask(lambda: self.store.add(self._key(f"claim/{self.rank}"), 1)) != 1
        if taken:
            raise RendezvousError(
                f"rank {self.labels[self.rank]} is taken at {self.where}: {self._holder()}",
                remedy="give every process a rank of its own",
            )
        self._host = hello.get("host")
        self.publish("hello", {**hello, "world_size": self.world_size})
        # Rank 0 first: ranks that expect another number of ranks would wait for hellos that never come, or
        # leave some out.
        first = self.read("hello", 0)
        if first["world_size"] != self.world_size:
            raise RendezvousError(
                f"rank {self.labels[self.rank]} expects {counted(self.world_size, 'rank')}, "
                f"rank {self.labels[0]} expects {first['world_size']}",
                remedy="start all ranks with the same world_size",
            )
        return self.gather("hello")

    def publish(self, topic: str, content: Mapping[str, Any]) -> None:
        """Set this rank's content for `topic`."""
        self._ask(lambda: self.store.set(self._key(f"{topic}/{self.rank}"), json.dumps(content)))

    def read(self, topic: str, rank: int) -> dict[str, Any]:
        """Wait for what a rank publishes about `topic`, and return it."""
        return self._read_all(topic, [rank])[rank]

    def gather(self, topic: str) -> dict[int, dict[str, Any]]:
        """Return what every rank published about `topic`."""
        return self._read_all(topic, list(range(self.world_size)))

    def raise_if_failed(self) -> None:
        """Raise if a rank has given up; asks the store at most once in `_ASK_SECONDS`."""
        self.cancel()
        if time.monotonic() - self._asked >= _ASK_SECONDS:
            self._raise_published_failure()

    def _raise_published_failure(self) -> None:
        self._asked = time.monotonic()
        if self._has(_BAD):
            news = json.loads(self._ask(lambda: self.store.get(self._key(_BAD))))
            raise RendezvousError(f"rank {news['rank']} gave up: {news['text']}")

    def finish(self, leave: Callable[[], None]) -> None:
        """Return when every rank is ready; rank 0 then ends the round with `leave`."""
        self.publish("done", {})
        if self.rank == 0:
            # Two phases, because the store ends with rank 0: rank 0 closes it only when no rank has anything
            # left to ask. FINISHED releases the ranks that wait before the store is gone.
            self.gather("done")
            self._ask(lambda: self.store.set(self._key(_FINISHED), "1"))
            leave()
            return
        limit, mine = Deadline(self.deadline), self.labels[self.rank]
        what = f"rank {mine} waits for rank {self.labels[0]} to complete the group"
        try:
            while not self._wait([self._key(_FINISHED)]):
                self._raise_published_failure()
                self._rest(limit, partial(str, what))
        except StoreGoneError as error:
            # Rank 0 closes it when all are ready. If it died instead, the transport will say so.
            _log.debug("rank %d: the store closed early: %s", mine, error)

    def _read_all(self, topic: str, senders: list[int]) -> dict[int, dict[str, Any]]:
        keys = [self._key(f"{topic}/{rank}") for rank in senders]
        limit = Deadline(self.deadline)
        while not self._wait(keys):
            self._raise_published_failure()
            self._check_neighbours()
            self._rest(limit, lambda: self._waiting_text(topic, senders))
        values = self._ask(lambda: self.store.multi_get(keys))
        return {rank: json.loads(value) for rank, value in zip(senders, values, strict=True)}

    def _wait(self, keys: list[str]) -> bool:
        """Return whether the keys are there; wait a while for them where the store can."""
        store = self.store
        if not isinstance(store, StoreClient):
            return bool(self._ask(lambda: store.check(keys)))
        # A failure that a rank publishes ends the wait as well: `_raise_published_failure` then raises its
        # reason. Not longer than a moment, because a neighbour that was killed publishes nothing
        # (`_check_neighbours`).
        left = min(self.deadline - time.monotonic(), _LOOK_AROUND_SECONDS)
        return bool(self._ask(lambda: store.await_keys(keys, max(left, 0.001), [self._key(_BAD)])))

    def _rest(self, limit: Deadline, what: Callable[[], str]) -> None:
        if isinstance(self.store, StoreClient):
            limit.check(what)  # the wait itself was the pause
        else:
            limit.pause(what)

    def _check_neighbours(self) -> None:
        """Raise if a rank of this host that had come has ended since: it will not come again."""
        now = time.monotonic()
        if now - self._looked_around < _LOOK_AROUND_SECONDS or self._host is None:
            return
        self._looked_around = now
        for rank in range(self.world_size):
            if rank not in self._neighbours and rank != self.rank and self._has(f"hello/{rank}"):
                hello = json.loads(self._ask(partial(self.store.get, self._key(f"hello/{rank}"))))
                if hello.get("host") == self._host:
                    self._neighbours[rank] = int(hello["pid"])
        for rank, pid in self._neighbours.items():
            if not start_time(pid):
                label = self.labels[rank]
                raise RendezvousError(
                    f"rank {label} (process {pid}) ended while the group was forming",
                    remedy=f"see why rank {label} ended, then start all ranks again",
                )

    def _waiting_text(self, topic: str, senders: list[int]) -> str:
        missing = [rank for rank in senders if not self._has(f"{topic}/{rank}")] or senders
        whom = ranks((self.labels[rank] for rank in missing), all_named=True)
        return f"rank {self.labels[self.rank]} waits for {whom} at {self.where}"

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.check([self._key(key)])))

    def _holder(self) -> str:
        try:
            hello = self.read("hello", self.rank)
        except (RendezvousError, StoreGoneError):
            return "by a process that has not said who it is"
        return f"by process {hello.get('pid')} on {hello.get('hostname')}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (DistError, OSError) as error:
            raise StoreGoneError(str(error)) from error
