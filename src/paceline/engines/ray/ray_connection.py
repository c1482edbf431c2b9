"""This process's connection to a Ray cluster: made at most once, shared by the runs of the process, closed
with the last of them where it was made here. Each way to fail is one error, within seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final, final

from paceline.core.errors import UnavailableError, UsageError
from paceline.core.reachable_address import address_for_hosts
from paceline.engines.ray import requests
from paceline.engines.ray.ray_settings import LOCAL, RaySettings

_CLIENT: Final = "ray://"
_REACH_SECONDS: Final = 5.0
_ATTEMPTS: Final = 3
_TAKES_PROXY: Final = "RAY_grpc_enable_http_proxy"  # the variable, in Ray's spelling
# Of a head whose process for this client did not start in time, or ended while the head looked at it.
_BUSY_HEAD: Final = ("Starting Ray client server failed", "Initialization failure from server")

_lock = threading.Lock()
_current: RayConnection | None = None


@contextlib.contextmanager
def needing_ray() -> Iterator[None]:
    """Explain an import of Ray, or of what it needs, that fails."""
    try:
        yield
    except ImportError as error:
        raise UnavailableError(
            f"the engine Ray needs the package ray, which cannot be imported here ({error})",
            remedy="pip install 'paceline[ray]'",
        ) from error


def import_ray() -> Any:
    """Return Ray."""
    with needing_ray():
        import ray
    return ray


@final
class RayConnection:
    """A cluster that this process is connected to; `is_ours`: this module connected it."""

    def __init__(self, ray: Any, address: str, *, is_ours: bool) -> None:
        self.ray = ray
        self.address = address
        self.is_ours = is_ours
        self.users = 0

    @property
    def is_local(self) -> bool:
        """Whether this process started the cluster, by this module or by the user's own ray.init()."""
        return self.address == LOCAL

    @property
    def is_lost(self) -> bool:
        """Whether this process is not connected any more. Ray is not asked: most calls without a connection
        start another cluster on this machine."""
        if not self.ray.is_initialized():
            return True
        client = self.ray.util.client.ray
        if not client.is_connected():
            return False
        # A head that has no process for this client any more refuses the channel of its calls, for good. To
        # Ray the client is connected all the same, and there is no public word for the channel.
        return bool(client.get_context().client_worker.data_client._in_shutdown)

    def living_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def check_capacity(self, bundle: dict[str, float]) -> None:
        resources = [node["Resources"] for node in self.living_nodes()]
        requests.check_capacity(bundle, resources, self.address)

    def address_for_nodes(self) -> str:
        """Return the address of this machine that the nodes reach."""
        return address_for_hosts({node["NodeManagerAddress"] for node in self.living_nodes()})

    def close(self) -> None:
        """Give up this use of the connection; the last one disconnects."""
        global _current
        with _lock:
            self.users -= 1
            if self.users > 0 or not self.is_ours or _current is not self:
                return
            _current = None
            self.ray.shutdown()


def starts_cluster(settings: RaySettings) -> bool:
    """Return whether `connect` would start a local cluster."""
    ray = import_ray()
    return not ray.is_initialized() and _wanted_address(settings) == LOCAL


def connect(settings: RaySettings) -> RayConnection:
    """Return the connection that these settings mean; made now where there is none."""
    global _current
    ray = import_ray()
    with _lock:
        if _current is not None and not (ray.is_initialized() and (_current.is_ours or _current.users)):
            _current = None  # the user shut Ray down, and may be connected elsewhere since
        if _current is None:
            if ray.is_initialized():
                _current = RayConnection(ray, _address_in_use(ray), is_ours=False)
            else:
                _current = _made(ray, settings)
        found = _current
    wanted = _wanted_address(settings)
    if wanted not in ("auto", LOCAL, found.address) and found.is_ours:
        raise UsageError(
            f"this process is connected to Ray at {found.address}, and address={wanted!r} is another cluster",
            remedy="train on one cluster at a time, or call ray.shutdown() before",
        )
    if not settings.autoscales:
        try:
            found.check_capacity(requests.bundle_of(settings))
        except UsageError:
            if found.is_ours and not found.users:
                found.close()
            raise
    return found


def _address_in_use(ray: Any) -> str:
    if ray.util.client.ray.is_connected():
        return _CLIENT
    # Of a process that is itself the head's; Ray has no public word for that.
    node = getattr(ray._private.worker, "_global_node", None)
    if node is not None and node.is_head():
        return LOCAL
    return str(ray.get_runtime_context().gcs_address)


def _wanted_address(settings: RaySettings) -> str:
    given = settings.address
    if given in (None, "auto"):
        return os.environ.get("RAY_ADDRESS") or given or LOCAL
    return given


def _made(ray: Any, settings: RaySettings) -> RayConnection:
    address = _wanted_address(settings)
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address == LOCAL:
        # Ray counts cores; here more workers than cores are the user's own wish.
        needed = requests.bundle_of(settings)["CPU"] * max(settings.nodes, settings.max_nodes or 0)
        options |= {"num_cpus": max(os.cpu_count() or 1, int(needed + 0.999)), "include_dashboard": False}
        if settings.resources:
            many = max(settings.nodes, settings.max_nodes or 0)
            own = {name: amount * many for name, amount in settings.resources.items() if name != "memory"}
            options["resources"] = own
    elif address != "auto":
        check_head(address)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _handlers_kept():
                if address.startswith(_CLIENT):
                    # By ray.init the settings of a job travel as a pickled object, at which a head of another
                    # version fails before versions are compared.
                    ray.util.connect(address.removeprefix(_CLIENT), ray_init_kwargs=options)
                else:
                    ray.init(address=address, namespace="paceline", **options)
            break
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            if attempt == _ATTEMPTS or not any(words in str(error) for words in _BUSY_HEAD):
                raise _explained(address, error) from error
    return RayConnection(ray, address, is_ours=True)


def _explained(address: str, error: Exception) -> Exception:
    text = str(error).strip() or type(error).__name__
    if "ersion mismatch" in text or "versions differ" in text:
        return UnavailableError(
            f"the Ray cluster at {address} runs other versions than this process. {' '.join(text.split())}",
            remedy="install the cluster's version of ray (and of Python) here: pip install ray==VERSION",
        )
    if address == "auto":
        return UnavailableError(
            f"no Ray cluster runs on this machine: {text.splitlines()[0]}",
            remedy='start one (ray start --head), name its head (address="ray://HEAD:10001"), or leave '
            "address out for a local cluster",
        )
    first, *more = [line.strip() for line in text.splitlines() if line.strip()]
    # Of an error on the server's side, its traceback's last line.
    reason = f"{first} {more[-1]}" if more else first
    return UnavailableError(
        f"Ray at {address} could not be connected: {reason}",
        remedy="check that the head runs (ray status) and that the address and port are its own",
    )


def check_head(address: str) -> None:
    """Raise UnavailableError where nothing answers like Ray: its own attempts take most of a minute."""
    target = address.removeprefix(_CLIENT)
    kind = "a Ray client server" if address.startswith(_CLIENT) else "a Ray head"
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # its own certificates are needed to ask
    with needing_ray():
        import grpc
    # Ray's own connections go past the proxy of http_proxy.
    takes_proxy = os.environ.get(_TAKES_PROXY, "0").lower() in ("1", "true")
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", int(takes_proxy))]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_REACH_SECONDS)
        except grpc.FutureTimeoutError:
            raise UnavailableError(
                f"{kind} at {target} does not answer: {_socket_trouble(target)}",
                remedy="check that the head runs (ray status), that the port is right (Ray client: 10001, "
                "head: 6379) and that no firewall is between",
            ) from None


def _socket_trouble(target: str) -> str:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return "something listens there that is not Ray"


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces: a run saves and leaves on it."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and before is not None:
            signal.signal(signal.SIGTERM, before)
