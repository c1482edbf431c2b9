"""A fake Kubernetes cluster: API server, controllers, scheduler and kubelets in this process, pods as
containers on hosts of a switch (network namespaces).

    with Cluster(folder, nodes=3) as cluster:
        engine = paceline.Kubernetes(kubeconfig=str(cluster.kubeconfig), image=IMAGE, ...)

Host 0 is the control plane: the API server listens there, and on loopback of this process. It is a fake
because no registry that can be reached from here has a kube-apiserver; docs/kubernetes.md says what it does
not do.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml
from tests.clusters.kubernetes import sandbox
from tests.clusters.kubernetes.admission import Quota
from tests.clusters.kubernetes.api_server import ApiServer
from tests.clusters.kubernetes.certificates import certificates
from tests.clusters.kubernetes.job_controller import Controllers
from tests.clusters.kubernetes.job_set_controller import JOB_SETS, JobSets
from tests.clusters.kubernetes.kubelet import Kubelets, Node
from tests.clusters.kubernetes.object_store import JsonObject, ObjectStore, now
from tests.clusters.kubernetes.sandbox import ROOT, Container

from paceline.testing import netns
from paceline.testing.netns import Hosts

IMAGE = "registry.example/paceline:test"
USER = 1000
_TURN_SECONDS = 0.05
_PORT = 6443
_libc = ctypes.CDLL(None, use_errno=True)
_NEWNET = 0x40000000


def why_not() -> str:
    return netns.why_not() or sandbox.why_not()


class Cluster:
    """See the module. `backoff`: seconds before a failed pod of a Job comes again; 10 in Kubernetes."""

    def __init__(self, folder: Path, nodes: int, backoff: float = 1.0) -> None:
        self.folder = folder
        self.store = ObjectStore()
        self.hosts = Hosts(nodes + 1)
        self.nodes = [Node(f"node{number}", number) for number in range(1, nodes + 1)]
        self.kubelets = Kubelets(self.store, self.hosts, self.nodes, folder / "pods")
        self.kubelets.images.add(IMAGE)
        self.controllers = Controllers(self.store, backoff)
        self.job_sets = JobSets(self.store)
        self.token = "the-user's-own-token"
        self.api = ApiServer(self.store, self.token, self.kubelets.log_lines)
        self.kubeconfig = folder / "kubeconfig"
        self.inner_kubeconfig = folder / "kubeconfig-inside"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._turns, daemon=True)
        self._logins = itertools.count()
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        self.hosts.__enter__()
        try:
            authority, tls = certificates(["127.0.0.1", self.hosts.addresses[0]], self.folder)
            self.authority = authority
            outer = socket.create_server(("127.0.0.1", 0))
            outer_port = outer.getsockname()[1]
            with self.inside(0):
                inner = socket.create_server((self.hosts.addresses[0], _PORT))
            for listening in (outer, inner):
                self.api.listen(listening, tls)
            self.server = f"https://127.0.0.1:{outer_port}"
            self.write_kubeconfig(self.kubeconfig, self.server, authority)
            self.write_kubeconfig(
                self.inner_kubeconfig, f"https://{self.hosts.addresses[0]}:{_PORT}", authority
            )
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.api.close()
        self.kubelets.close()
        self.hosts.close()

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Have this thread in a host's network, for the sockets that it makes."""
        with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{self.hosts.names[host]}") as there:
            assert _libc.setns(there.fileno(), _NEWNET) == 0
            try:
                yield
            finally:
                assert _libc.setns(own.fileno(), _NEWNET) == 0

    def install_job_sets(self, installed: bool) -> None:
        """Have the API server know JobSets, as it does where their controller is installed; or not."""
        self.api.kinds.pop(JOB_SETS, None)
        if installed:
            self.api.kinds[JOB_SETS] = "JobSet"

    def set_quota(self, quota: Quota | None) -> None:
        self.api.quota = self.controllers.quota = quota

    def start_as_user(self, command: list[str], folder: Path, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the control plane's host as the user who may use the cluster, in a container of
        the pods' kind that sees `folder`."""
        environment = {**os.environ, **options.pop("env", {}), "PATH": sandbox.path_variable()}
        environment["HOME"] = "/tmp"
        environment |= {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "KUBECONFIG": str(self.inner_kubeconfig)}
        environment.pop("XDG_STATE_HOME", None)
        system, _ = sandbox.system_parts()
        shown = [*system, *sandbox.image_folders(), str(ROOT), str(self.folder)]
        container = Container(
            command,
            environment,
            hostname="login",
            user=USER,
            folder_of_work=str(ROOT),
            binds=[*((path, path, True) for path in shown), (str(folder), str(folder), False)],
            memory=[("/tmp", "512m", "1777"), ("/dev/shm", "16m", "1777")],
        )
        place = folder / f"login{next(self._logins)}"
        return self.hosts.start(0, container.command_line(place), **options)

    def write_kubeconfig(self, path: Path, server: str, authority: bytes, token: str = "") -> None:
        cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token or self.token}}],
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o644)

    # faults

    def kill_in_pod(self, hostname: str, pid: int) -> None:
        """SIGKILL a process of a pod by the number that it has there; 1 is the container's own."""
        first, _ = self.kubelets.first_process(hostname)
        if pid == 1:
            os.kill(first, signal.SIGKILL)
            return
        inside = ["nsenter", "-t", str(first), "--pid", "--mount", "--root"]
        subprocess.run([*inside, "kill", "-9", str(pid)], check=True)

    def lose_node(self, hostname: str) -> str:
        """Cut the node of a pod off and have its power fail. The cluster gives its pods up at once (after
        `tolerationSeconds` in Kubernetes): they are marked, and stay until the node is back or somebody
        forces them out."""
        _, one = self.kubelets.first_process(hostname)
        node = one.node
        node.ready = False
        self.hosts.cut(node.host)
        sandbox.kill(one.process)

        def change(pod: JsonObject) -> None:
            pod["metadata"].update(deletionTimestamp=now(), deletionGracePeriodSeconds=30)
            pod["status"]["conditions"].append(
                {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
            )

        self.store.update(one.pod, change)
        return node.name

    def heal_node(self, name: str) -> None:
        node = next(node for node in self.nodes if node.name == name)
        self.hosts.heal(node.host)
        node.ready = True

    def left(self) -> list[str]:
        """Return objects and processes of runs that are still there."""
        kinds = ("JobSet", "Job", "StatefulSet", "Pod", "Secret", "Service")
        objects = [
            f"{kind} {one['metadata']['name']}"
            for kind in kinds
            for one in self.store.every(kind)
            if kind != "Pod" or one["status"]["phase"] in ("Pending", "Running")
        ]
        processes = [
            f"process {pid} on {node.name}" for node in self.nodes for pid in self.hosts.pids(node.host)
        ]
        return objects + processes

    def _turns(self) -> None:
        while not self._closing.wait(_TURN_SECONDS):
            try:
                with self.store.lock:
                    self.job_sets.turn()
                self.controllers.turn()
                self.kubelets.turn()
            except BaseException as error:
                self.failure = error
                raise
