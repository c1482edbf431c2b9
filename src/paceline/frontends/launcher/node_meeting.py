"""Where the launchers of several nodes agree: who has come, which start of the ranks is under way, how it
ended, and whether there is another.

Node 0 serves a small store at the master's address (comm/rendezvous/key_value_store.py), with the secret that
PACELINE_SECRET_FILE names where it names one; every node is a client. What is in it:

    node/K            the host, process and number of ranks of node K
    start/N           node 0: attempt N begins, and where its ranks meet
    failed/N          the first failure of attempt N that was published
    failed/N/K        what failed on node K, if anything did
    ended/N/K         node K: no rank of attempt N runs here any longer
    over              node 0: there is no further attempt, and the exit code of the job
    left/K            node K has read that
    alive/K           counts the signs of life of node K

A thread waits for the failure of the attempt under way and wakes the launcher, and gives the signs of life. A
node without one for ten intervals, and at least 15 s, is lost: the job ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol, final

from paceline.comm.rendezvous.environment import Address, group_secret
from paceline.comm.rendezvous.key_value_store import StoreClient, StoreServer
from paceline.core.errors import PacelineError, PeerLostError, RendezvousError
from paceline.core.handshake import KeyedDifferentlyError, VersionError
from paceline.core.host import host_name
from paceline.core.listen_address import ListenAddress, listener, local_address, resolves_to_loopback
from paceline.core.wording import counted, listed
from paceline.frontends.launcher.launch_config import MASTER_PORT, LaunchConfig
from paceline.frontends.launcher.rank_environment import Placement

_ANSWER_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.5
_LOST_INTERVALS: Final = 10
_LOST_SECONDS: Final = 15.0
_RETRY_SECONDS: Final = 0.1


@final
@dataclass(frozen=True)
class NodeFailure:
    """What ended an attempt: a rank that failed, a node that was `lost`, or a signal (rank -1 for both).
    `final`: not to be tried again. `echo`: the rank had lost another one, as far as its error says."""

    node: int
    rank: int
    exit_code: int
    what: str
    final: bool = False
    echo: bool = False
    lost: bool = False


def root_failure(first: NodeFailure, all_of_them: Sequence[NodeFailure]) -> NodeFailure:
    """Return the failure that the others followed from: the one that was published first, unless it is an
    echo and another node knows better. Nodes have no common clock."""
    causes = [failure for failure in (first, *all_of_them) if not failure.echo]
    chosen = causes[0] if causes else first
    return replace(chosen, final=any(failure.final for failure in (first, *all_of_them)))


class JobMeeting(Protocol):
    """What the launchers of a job agree on. `failure`: what ended the attempt under way, of whatever node.
    `max_restarts` is node 0's."""

    failure: NodeFailure | None
    max_restarts: int

    def begin(self, attempt: int) -> Placement:
        """Return where the ranks of an attempt meet."""

    def fail(self, failure: NodeFailure) -> None:
        """Publish what failed on this node."""

    def await_end(self, attempt: int) -> None:
        """Return when no node runs a rank of the attempt; `failure` is known then."""

    def finish(self, exit_code: int) -> int:
        """End the job; return node 0's exit code for it."""

    def close(self) -> None:
        """Leave."""


@final
class LoneNode:
    """The meeting of a job with one node: it agrees with itself."""

    def __init__(self, config: LaunchConfig, free_port: Callable[[], int]) -> None:
        self._config = config
        self._free_port = free_port
        self.failure: NodeFailure | None = None
        self.max_restarts = config.max_restarts
        self._check_port()

    def _check_port(self) -> None:
        """Refuse a port at which rank 0 could not serve, before any rank starts."""
        port, host = self._config.master_port, self._config.master_addr
        if port is None:
            return
        try:
            listener("" if resolves_to_loopback(host) else host, port).close()
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot serve at {host}:{port}: {error.strerror or error}",
                remedy="leave --master-port out for a free port, or choose another one; `ss -tlnp` shows "
                "which program listens there",
            ) from error

    def begin(self, attempt: int) -> Placement:
        self.failure = None
        port = self._config.master_port or self._free_port()
        return Placement(self._config.master_addr, port, 0, self._config.ranks_here, attempt)

    def fail(self, failure: NodeFailure) -> None:
        self.failure = self.failure or failure

    def await_end(self, attempt: int) -> None:
        return

    def finish(self, exit_code: int) -> int:
        return exit_code

    def close(self) -> None:
        return


@final
class NodeMeeting:
    """One node's part. `wake` is called from another thread when another node has published a failure."""

    def __init__(self, config: LaunchConfig, free_port: Callable[[], int], wake: Callable[[], None]) -> None:
        self._config = config
        self._free_port = free_port
        self._wake = wake
        self.failure: NodeFailure | None = None
        self.max_restarts = config.max_restarts
        self._address = Address(config.master_addr, config.master_port or MASTER_PORT)
        self._secret = group_secret(os.environ)
        self._attempt = -1
        self._failing = threading.Lock()  # `failure` belongs to `_attempt`
        self._ranks: list[int] = []
        self._hosts: list[str] = []
        self._stopped = threading.Event()
        self._watcher: threading.Thread | None = None
        self._store: StoreClient | None = None
        self._server: StoreServer | None = None
        self._dialled = (self._address.host, self._address.port)
        try:
            if config.node_rank == 0:
                self._serve()
            self._store = self._connect()
            self._meet()
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="paceline-nodes", daemon=True)
        self._watcher.start()

    def begin(self, attempt: int) -> Placement:
        mine = self._config.node_rank
        if mine == 0:
            place = {"host": self._config.master_addr, "port": self._free_port()}
            self._set(f"start/{attempt}", place)
        self._await([f"start/{attempt}"], f"node 0 to begin attempt {attempt}")
        place = self._get(f"start/{attempt}")
        with self._failing:
            self.failure = None
            self._attempt = attempt
        first = sum(self._ranks[:mine])
        return Placement(str(place["host"]), int(place["port"]), first, sum(self._ranks), attempt)

    def fail(self, failure: NodeFailure) -> None:
        with self._asking() as store:
            first = store.add(f"claims/{self._attempt}", 1) == 1
        self._set(f"failed/{self._attempt}/{self._config.node_rank}", asdict(failure))
        if first:
            self._set(f"failed/{self._attempt}", asdict(failure))

    def await_end(self, attempt: int) -> None:
        self._set(f"ended/{attempt}/{self._config.node_rank}", {})
        keys = [f"ended/{attempt}/{node}" for node in range(self._config.nnodes)]
        self._await(keys, "the ranks of the other nodes to end")
        with self._asking() as store:
            names = [
                f"failed/{attempt}",
                *(f"failed/{attempt}/{node}" for node in range(self._config.nnodes)),
            ]
            values = [json.loads(value) for value in store.multi_get(names) if value is not None]
        if values:
            first, *others = (NodeFailure(**value) for value in values)
            with self._failing:
                self.failure = root_failure(first, others)

    def finish(self, exit_code: int) -> int:
        nodes, mine = self._config.nnodes, self._config.node_rank
        if mine == 0:
            self._set("over", {"exit_code": exit_code})
        self._await(["over"], "node 0 to end the job")
        exit_code = int(self._get("over")["exit_code"])
        self._set(f"left/{mine}", {})
        if mine == 0:
            # The store ends with this process: the others have read that it is over, or are gone themselves.
            with self._asking() as store:
                store.await_keys([f"left/{node}" for node in range(nodes)], _ANSWER_SECONDS)
        return exit_code

    def close(self) -> None:
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()

    def _serve(self) -> None:
        host = self._address.host
        listening = ListenAddress.from_environment(os.environ)
        try:
            # A name that means this machine alone here: the others know it by another address.
            everywhere = not listening.interface and resolves_to_loopback(host)
            opened = listening.open("" if everywhere else host, self._address.port)
        except OSError as error:
            raise RendezvousError(
                f"node 0 cannot serve at {self._address}: {error.strerror or error}",
                remedy="another program is there, or this machine does not have the address: check "
                "--master-addr and choose another --master-port on all nodes",
            ) from error
        self._dialled = local_address(opened)
        self._server = StoreServer(opened, self._secret)

    def _connect(self) -> StoreClient:
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            try:
                return StoreClient(*self._dialled, _ANSWER_SECONDS, secret=self._secret)
            except (OSError, PacelineError) as error:
                reason = getattr(error, "message", "") or getattr(error, "strerror", "") or str(error)
                # What one of the two would have to change does not change by waiting.
                hopeless = isinstance(error, KeyedDifferentlyError | VersionError)
                if hopeless or time.monotonic() >= deadline or self._stopped.is_set():
                    raise RendezvousError(
                        f"node 0 has not come to {self._address}"
                        + ("" if hopeless else f" within {self._config.start_timeout:g} s")
                        + f": {reason}",
                        remedy="start the launcher of node 0 with the same --master-addr and --master-port; "
                        "PACELINE_SECRET_FILE is set on all nodes, or on none",
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def _meet(self) -> None:
        config = self._config
        with self._asking() as store:
            taken = store.add(f"taken/{config.node_rank}", 1) != 1
        if taken:
            raise RendezvousError(
                f"node {config.node_rank} of the job at {self._address} has come already",
                remedy="give every node its own --node-rank; a second job needs another --master-port",
            )
        hello = {
            "host": host_name(),
            "ranks": config.ranks_here,
            "nodes": config.nnodes,
            "max_restarts": config.max_restarts,
        }
        self._set(f"node/{config.node_rank}", hello)
        keys = [f"node/{node}" for node in range(config.nnodes)]
        deadline = time.monotonic() + config.start_timeout
        while not self._has_come(keys):
            if time.monotonic() >= deadline:
                raise self._missing(keys)
        nodes = [self._get(key) for key in keys]
        self.max_restarts = int(nodes[0]["max_restarts"])
        self._ranks = [int(node["ranks"]) for node in nodes]
        self._hosts = [str(node["host"]) for node in nodes]
        odd = [number for number, node in enumerate(nodes) if node["nodes"] != config.nnodes]
        if odd:
            raise RendezvousError(
                f"node {odd[0]} expects {counted(int(nodes[odd[0]]['nodes']), 'node')}, this one "
                f"{config.nnodes}",
                remedy="give all nodes the same --nnodes",
            )

    def _missing(self, keys: list[str]) -> RendezvousError:
        with self._asking() as store:
            gone = [number for number, value in enumerate(store.multi_get(keys)) if value is None]
        nodes = f"{'nodes' if len(gone) > 1 else 'node'} {listed(gone)}"
        return RendezvousError(
            f"{nodes} of {self._config.nnodes} {'have' if len(gone) > 1 else 'has'} not come to "
            f"{self._address} within {self._config.start_timeout:g} s",
            remedy=f"start the launcher there, with --node-rank {gone[0]}, and check that it reaches "
            f"{self._address}; --start-timeout waits longer",
        )

    def _watch(self) -> None:
        """Give signs of life; wake the launcher when a node has failed or is lost."""
        config = self._config
        seen: dict[int, tuple[int, float]] = {}
        limit = max(_LOST_SECONDS, _LOST_INTERVALS * config.monitor_interval)
        try:
            with contextlib.closing(self._connect()) as store:
                while not self._stopped.is_set():
                    store.add(f"alive/{config.node_rank}", 1)
                    attempt = self._attempt
                    # It wakes up early when the failure comes; another attempt may have begun meanwhile.
                    if attempt >= 0 and self.failure is None:
                        if store.await_keys([f"failed/{attempt}"], config.monitor_interval, ["over"]):
                            self._read_failure(attempt)
                            self._wake()
                    else:
                        self._stopped.wait(config.monitor_interval)
                    self._look_for_lost(store, seen, limit)
        except (OSError, PacelineError) as error:
            if not self._stopped.is_set():
                self._lose(0, f"its launcher cannot be reached: {error}")

    def _look_for_lost(self, store: StoreClient, seen: dict[int, tuple[int, float]], limit: float) -> None:
        keys = [f"{kind}/{node}" for kind in ("alive", "left") for node in range(self._config.nnodes)]
        values = store.multi_get(keys)
        now = time.monotonic()
        for node in range(self._config.nnodes):
            count, left = int(values[node] or b"0"), values[node + self._config.nnodes]
            if node not in seen or seen[node][0] != count or left is not None:
                seen[node] = (count, now)
            elif now - seen[node][1] > limit:
                self._lose(node, f"there was no sign of life of its launcher for {limit:g} s")

    def _lose(self, node: int, why: str) -> None:
        host = self._hosts[node] if self._hosts else self._address.host
        self.failure = NodeFailure(node, -1, 1, f"node {node} ({host}) is lost: {why}", final=True, lost=True)
        self._stopped.set()
        self._wake()

    def _read_failure(self, attempt: int) -> None:
        with self._asking() as store:
            value = store.get(f"failed/{attempt}")
        with self._failing:
            # The launcher may know the root of it by now, from all nodes.
            if value is not None and attempt == self._attempt and self.failure is None:
                self.failure = NodeFailure(**json.loads(value))

    def _await(self, keys: list[str], what: str) -> None:
        """Wait for keys of nodes that are alive."""
        while not self._has_come(keys):
            self._check_watcher(what)

    def _check_watcher(self, what: str) -> None:
        if self.failure is not None and self.failure.lost:
            raise PeerLostError(f"waited for {what}: {self.failure.what}", remedy="start the job again")

    def _has_come(self, keys: list[str]) -> bool:
        """Wait for a moment; return whether all of `keys` are there."""
        with self._asking() as store:
            return store.await_keys(keys, _LOOK_SECONDS)

    def _set(self, key: str, value: Any) -> None:
        with self._asking() as store:
            store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        with self._asking() as store:
            return json.loads(store.get(key) or b"{}")

    @contextmanager
    def _asking(self) -> Iterator[StoreClient]:
        assert self._store is not None
        try:
            yield self._store
        except OSError as error:
            raise PeerLostError(
                f"the launcher of node 0 at {self._address} is gone: {error}",
                remedy="look at its output for the reason, and start the job again on all nodes",
            ) from error
