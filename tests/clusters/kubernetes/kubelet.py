"""The kubelet and the scheduler of the fake cluster: pods as containers on hosts of a switch.

One pod per node at a time, as training takes a node whole; the node's network is the pod's. What a pod's
security context asks for is done: user, read-only root, no capability, /dev/shm of the given size, secrets as
files. Names of headless Services are lines in /etc/hosts of every pod.
"""

from __future__ import annotations

import base64
import datetime
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters.kubernetes import sandbox
from tests.clusters.kubernetes.admission import RefusalError
from tests.clusters.kubernetes.expansion import expanded
from tests.clusters.kubernetes.object_store import JsonObject, ObjectStore, now
from tests.clusters.kubernetes.sandbox import ROOT, Container

from paceline.testing.netns import Hosts


@dataclass
class Node:
    """A host of the cluster. One that is not `ready` does not answer; what runs there runs on."""

    name: str
    host: int
    ready: bool = True
    schedulable: bool = True
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class RunningPod:
    pod: JsonObject
    node: Node
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    log: Path
    asked_at: float | None = None  # to end
    probed_at: float = 0.0


class Kubelets:
    """Runs the pods of all nodes. `images` are the names of images that can be pulled, `claims` the folders
    of PersistentVolumeClaims."""

    def __init__(self, store: ObjectStore, hosts: Hosts, nodes: list[Node], folder: Path) -> None:
        self._store, self._hosts, self.nodes, self._folder = store, hosts, nodes, folder
        self.images: set[str] = set()
        self.claims: dict[str, Path] = {}
        self.running: dict[str, RunningPod] = {}
        self._restarts: dict[str, tuple[int, JsonObject]] = {}

    def turn(self) -> None:
        with self._store.lock:
            for pod in self._store.every("Pod"):
                self._schedule(pod)
                self._start(pod)
        for one in list(self.running.values()):
            self._attend(one)
        self._write_names()

    def close(self) -> None:
        for one in self.running.values():
            sandbox.kill(one.process)
            one.process.wait()
            one.reader.join()
        self.running.clear()

    def first_process(self, hostname: str) -> tuple[int, RunningPod]:
        """Return process 1 of the pod with this host name, as this machine numbers it."""
        for one in self.running.values():
            if one.pod["spec"]["hostname"] == hostname and (pid := sandbox.first_process(one.process.pid)):
                return pid, one
        raise LookupError(f"no pod {hostname} runs")

    def log_lines(self, pod: JsonObject, of_previous: bool) -> list[str]:
        node = self._node(pod)
        if node is not None and not node.ready:
            # The API server asks the kubelet of the pod's node.
            told = f'Get "https://{node.name}:10250/containerLogs": dial tcp {node.name}:10250: i/o timeout'
            raise RefusalError(500, "InternalError", told)
        path = self._log_path(pod, _restarts(pod) - of_previous)
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def written(self, name: str) -> list[str]:
        """Return all lines of pods with this name, also of those that are gone."""
        texts = [path.read_text(errors="replace") for path in self._folder.glob(f"{name}.*.log")]
        return [line.partition(" ")[2] for text in texts for line in text.splitlines()]

    def _schedule(self, pod: JsonObject) -> None:
        if pod["spec"].get("nodeName") or pod["status"]["phase"] != "Pending":
            return
        busy = {
            one["spec"].get("nodeName")
            for one in self._store.every("Pod")
            if one["status"]["phase"] in ("Pending", "Running")
        }
        wanted = pod["spec"].get("nodeSelector", {}).items()
        fitting = [node for node in self.nodes if wanted <= node.labels.items()]
        free = next((n for n in fitting if n.ready and n.schedulable and n.name not in busy), None)
        claim = self._missing_claim(pod)

        def change(one: JsonObject) -> None:
            if free is not None and not claim:
                one["spec"]["nodeName"] = free.name
                one["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                return
            count = len(self.nodes)
            why = claim or (
                f"{count} Insufficient cpu."
                if fitting
                else f"{count} node(s) didn't match Pod's node affinity/selector."
            )
            told = f"0/{count} nodes are available: {why}"
            one["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": told}
            ]

        self._store.update(pod, change)

    def _start(self, pod: JsonObject) -> None:
        uid, node = pod["metadata"]["uid"], self._node(pod)
        if node is None or not node.ready or uid in self.running or pod["status"]["phase"] != "Pending":
            return
        if "deletionTimestamp" in pod["metadata"]:
            self._store.remove(pod)  # nothing of it runs
            return
        image = pod["spec"]["containers"][0]["image"]
        if image not in self.images:
            told = f'Back-off pulling image "{image}": ErrImagePull: not found'
            self._set_container(pod, {"waiting": {"reason": "ImagePullBackOff", "message": told}}, "Pending")
            return
        wrong = self._missing_parts(pod)
        if wrong:
            waiting = {"reason": "ContainerCreating", "message": wrong}
            self._set_container(pod, {"waiting": waiting}, "Pending")
            return
        self._run(pod, node)

    def _missing_parts(self, pod: JsonObject) -> str:
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"]["volumes"]:
            name = volume.get("secret", {}).get("secretName")
            if name and self._store.find("Secret", namespace, name) is None:
                return f'MountVolume.SetUp failed: secret "{name}" not found'
        return ""

    def _missing_claim(self, pod: JsonObject) -> str:
        for volume in pod["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in self.claims:
                return f'persistentvolumeclaim "{claim}" not found.'
        return ""

    def _run(self, pod: JsonObject, node: Node) -> None:
        folder = self._folder / pod["metadata"]["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        command = self._container(pod, node, folder).command_line(folder / "container")
        process = self._hosts.start(
            node.host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
        log = self._log_path(pod, self._restarts.get(pod["metadata"]["uid"], (0, {}))[0])
        reader = threading.Thread(target=_copy_lines, args=(process, log), daemon=True)
        reader.start()
        self.running[pod["metadata"]["uid"]] = RunningPod(pod, node, process, reader, log)

        def change(one: JsonObject) -> None:
            one["status"].update(phase="Running", podIP=self._hosts.addresses[node.host])

        self._store.update(pod, change)
        self._set_container(pod, {"running": {"startedAt": now()}}, "Running")

    def _container(self, pod: JsonObject, node: Node, folder: Path) -> Container:
        spec = pod["spec"]
        one, security = spec["containers"][0], spec["securityContext"]
        address = self._hosts.addresses[node.host]
        environment = {"PATH": sandbox.path_variable(), "HOSTNAME": spec["hostname"]}
        environment["KUBERNETES_SERVICE_HOST"] = self._hosts.addresses[0]
        # The image's own variables, which the manifest's win over.
        environment |= {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        known: dict[str, str] = {}
        for variable in one["env"]:
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = address if source == "status.podIP" else expanded(variable.get("value", ""), known)
            known[variable["name"]] = value
        environment |= known
        names = folder / "hosts"
        names.touch()
        names.write_text(f"127.0.0.1 localhost\n{address} {spec['hostname']}\n")
        system, _ = sandbox.system_parts()
        folders = [*system, *sandbox.image_folders(), str(ROOT)]
        made = Container(
            [expanded(word, known) for word in one["command"]],
            environment,
            hostname=spec["hostname"],
            user=security["runAsUser"],
            folder_of_work=one.get("workingDir", str(ROOT)),
            read_only=one["securityContext"]["readOnlyRootFilesystem"],
            binds=[(path, path, True) for path in folders] + [(str(names), "/etc/hosts", True)],
        )
        mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
        for volume in spec["volumes"]:
            self._add_volume(made, pod, volume, mounts[volume["name"]], folder)
        return made

    def _add_volume(
        self, made: Container, pod: JsonObject, volume: JsonObject, path: str, folder: Path
    ) -> None:
        group = pod["spec"]["securityContext"]["fsGroup"]
        if "secret" in volume:
            secret = self._store.find("Secret", pod["metadata"]["namespace"], volume["secret"]["secretName"])
            assert secret is not None
            place = folder / volume["name"]
            place.mkdir(exist_ok=True)
            for name, data in secret["data"].items():
                (place / name).touch()
                (place / name).write_bytes(base64.b64decode(data))
                # Root's, and of fsGroup, which may read it too.
                os.chown(place / name, 0, group)
                (place / name).chmod(volume["secret"]["defaultMode"] | 0o040)
            made.binds.append((str(place), path, True))
        elif "persistentVolumeClaim" in volume:
            place = self.claims[volume["persistentVolumeClaim"]["claimName"]]
            made.binds.append((str(place), path, False))
        elif volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].replace("Mi", "m").replace("Gi", "g")
            made.memory.append((path, size, "1777"))
        else:
            place = folder / volume["name"]
            place.mkdir(exist_ok=True)
            place.chmod(0o777)
            made.binds.append((str(place), path, False))

    def _attend(self, one: RunningPod) -> None:
        pod, code = one.pod, one.process.poll()
        if not one.node.ready:
            return  # nobody hears of what happens there
        gone = self._store.find("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"]) is not pod
        if code is None:
            if gone:
                sandbox.kill(one.process)
            elif "deletionTimestamp" in pod["metadata"]:
                self._terminate(one)
            else:
                self._probe(one)
            return
        one.reader.join()
        del self.running[pod["metadata"]["uid"]]
        if gone:
            return
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        if "deletionTimestamp" in pod["metadata"]:
            self._set_container(pod, {"terminated": ended}, "Failed" if code else "Succeeded")
            if not self._store.is_kept(pod):
                self._store.remove(pod)
        elif pod["spec"]["restartPolicy"] == "Always":
            count = self._restarts.get(pod["metadata"]["uid"], (0, {}))[0]
            self._restarts[pod["metadata"]["uid"]] = (count + 1, {"terminated": ended})
            self._run(pod, one.node)
        else:
            self._set_container(pod, {"terminated": ended}, "Failed" if code else "Succeeded")

    def _terminate(self, one: RunningPod) -> None:
        if one.asked_at is None:
            one.asked_at = time.monotonic()
            if pid := sandbox.first_process(one.process.pid):
                os.kill(pid, signal.SIGTERM)
        elif time.monotonic() > one.asked_at + one.pod["metadata"]["deletionGracePeriodSeconds"]:
            sandbox.kill(one.process)

    def _probe(self, one: RunningPod) -> None:
        """Run the readiness probe in the pod's namespaces."""
        probe, pid = (
            one.pod["spec"]["containers"][0]["readinessProbe"],
            sandbox.first_process(one.process.pid),
        )
        if pid is None or time.monotonic() - one.probed_at < probe["periodSeconds"]:
            return
        one.probed_at = time.monotonic()
        command = probe["exec"]["command"]
        inside = ["nsenter", "-t", str(pid), "--mount", "--pid", "--net", "--root", "--wd"]
        ready = subprocess.run([*inside, *command], capture_output=True, check=False).returncode == 0

        def change(pod: JsonObject) -> None:
            for status in pod["status"].get("containerStatuses", ()):
                status["ready"] = ready

        self._store.update(one.pod, change)

    def _set_container(self, pod: JsonObject, state: JsonObject, phase: str) -> None:
        restarts, last = self._restarts.get(pod["metadata"]["uid"], (0, {}))
        name = pod["spec"]["containers"][0]["name"]
        status: dict[str, Any] = {"name": name, "state": state, "restartCount": restarts, "ready": False}
        if last:
            status["lastState"] = last

        def change(one: JsonObject) -> None:
            one["status"].update(phase=phase, containerStatuses=[status])

        self._store.update(pod, change)

    def _write_names(self) -> None:
        """Give every pod the names of all pods of headless Services."""
        lines = ["127.0.0.1 localhost"]
        for one in self.running.values():
            spec, address = one.pod["spec"], self._hosts.addresses[one.node.host]
            namespace = one.pod["metadata"]["namespace"]
            lines.append(f"{address} {spec['hostname']}")
            if spec["subdomain"] and self._store.find("Service", namespace, spec["subdomain"]):
                lines.append(f"{address} {spec['hostname']}.{spec['subdomain']}")
        text = "\n".join(lines) + "\n"
        for uid in self.running:
            path = self._folder / uid / "hosts"
            if path.read_text() != text:
                path.write_text(text)  # in place: the pod has this very file mounted

    def _node(self, pod: JsonObject) -> Node | None:
        return next((node for node in self.nodes if node.name == pod["spec"].get("nodeName")), None)

    def _log_path(self, pod: JsonObject, restarts: int) -> Path:
        metadata = pod["metadata"]
        return self._folder / f"{metadata['name']}.{metadata['uid']}.{restarts}.log"


def _restarts(pod: JsonObject) -> int:
    """Return the restarts of a pod's container by its status."""
    statuses = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
    return int(statuses[0]["restartCount"])


def _copy_lines(process: subprocess.Popen[bytes], log: Path) -> None:
    """Write what a container says as a runtime does: with the time of every line."""
    assert process.stdout is not None
    with log.open("a") as file:
        for line in process.stdout:
            moment = datetime.datetime.now(datetime.UTC)
            file.write(f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z {line.decode(errors='replace').rstrip()}\n")
            file.flush()
    process.stdout.close()
