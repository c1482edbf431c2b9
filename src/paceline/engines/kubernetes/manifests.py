"""Manifests as plain data: the pod, and the Job or StatefulSet of agents.

Every pod runs as an ordinary user, with a read-only root file system, no capability, no way to gain one, and
the runtime's own seccomp profile: what the namespace's strictest Pod Security Standard ("restricted") admits.
Writable are /tmp, /dev/shm (in memory) and the volumes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from paceline.control.spool import STOPPED_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.core.errors import UsageError
from paceline.engines.engine import AgentSpec, EngineRequest
from paceline.engines.kubernetes.pod_settings import PodSettings

Manifest = dict[str, Any]

CONTAINER: Final = "paceline"
RUN_LABEL: Final = "paceline/run"
TOKEN_FOLDER: Final = "/var/run/paceline"
TOKEN_KEY: Final = "token"
TOKEN_FILE: Final = f"{TOKEN_FOLDER}/{TOKEN_KEY}"
_TOKEN_VOLUME: Final = "token"
GPU: Final = "nvidia.com/gpu"
NODE_LOSS_SECONDS: Final = 30
AGENT_RETRIES: Final = 100
KEPT_SECONDS: Final = 3600
"""How long a Job that has ended is kept, for its logs."""

MISTAKE_EXIT_CODE: Final = 2
_MOST_NAME: Final = 45  # with an index, a random suffix and a service's name behind it: below 63


def object_name(text: str) -> str:
    """Return a run's name as Kubernetes allows it."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MOST_NAME].strip("-")
    if not name or not name[0].isalpha():
        name = f"run-{name}".strip("-")
    return name


def agents_request(settings: PodSettings, agents: AgentSpec) -> EngineRequest:
    """Return the agents' object, and the name of the Secret that it expects."""
    if settings.kind == "jobset":
        raise UsageError(
            "a JobSet holds a whole run, and this one has its supervisor here",
            remedy='hand the run over with `paceline submit`, or use kind="job"',
        )
    name = object_name(agents.run)
    command = agents.command(TOKEN_FILE, settings.python)
    port = agents.address[1]
    template = pod_template(settings, name, settings.image, command, port, agents.environment)
    set_gpus(template, agents.gpus_per_node)
    if settings.kind == "statefulset":
        owner = stateful_set(settings, name, template, agents.nodes)
    else:
        owner = indexed_job(name, template, agents.nodes, AGENT_RETRIES)
    labelled(owner, name, settings)
    return {"kind": settings.kind, "name": name, "secret": secret_name(name), "objects": [owner]}


def pod_template(
    settings: PodSettings,
    name: str,
    image: str,
    command: Sequence[str],
    port: int,
    environment: Mapping[str, str],
) -> Manifest:
    """Return the template of a pod that runs one container; `port` is the supervisor's."""
    mounts, volumes = _volumes(settings, name)
    variables: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        # The root file system is read-only: what libraries keep in a home folder goes to /tmp.
        {"name": "HOME", "value": "/tmp"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        *(
            {"name": key, "value": literal(str(value))}
            for key, value in {**settings.environment, **environment}.items()
        ),
    ]
    one: Manifest = {
        "name": CONTAINER,
        "image": image,
        "command": [literal(word) for word in command],
        "env": variables,
        "readinessProbe": readiness(port),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if resources := resource_table(settings):
        one["resources"] = resources
    if settings.folder:
        one["workingDir"] = settings.folder
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.user,
            "fsGroup": settings.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # One node, one agent: its workers share memory, and a lost node costs one of them.
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {RUN_LABEL: name}},
            }
        ],
        # Without these a pod of a lost node is replaced after five minutes.
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{taint}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": NODE_LOSS_SECONDS,
            }
            for taint in ("not-ready", "unreachable")
        ],
        "containers": [one],
        "volumes": volumes,
    }
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    return {"metadata": {"labels": {RUN_LABEL: name, **settings.labels}}, "spec": spec}


def literal(text: str) -> str:
    """Return what Kubernetes reads as this text: it replaces $(NAME) and $$ in commands and variables."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _volumes(settings: PodSettings, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """Return where the container mounts volumes, and the volumes."""
    mounts: list[Manifest] = [
        {"name": _TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Manifest] = [
        # 256 in YAML and JSON, which have no octal numbers; fsGroup makes it 0440 for the container's user.
        {"name": _TOKEN_VOLUME, "secret": {"secretName": secret_name(name), "defaultMode": 0o400}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
    ]
    for number, (path, claim) in enumerate(settings.volumes.items()):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return mounts, volumes


def container(template: Manifest) -> Manifest:
    """Return the only container of a template."""
    found: Manifest = template["spec"]["containers"][0]
    return found


def set_gpus(template: Manifest, gpus: int) -> None:
    """Ask for whole GPUs; Kubernetes takes the limit as the request."""
    if gpus:
        container(template).setdefault("resources", {}).setdefault("limits", {})[GPU] = gpus


def resource_table(settings: PodSettings) -> Manifest:
    """Return what a pod asks for, without GPUs. Memory is limited to its request: a pod that may take more is
    the first to be evicted."""
    requests = {"cpu": settings.cpus, "memory": settings.memory}
    found: Manifest = {}
    if given := {key: value for key, value in requests.items() if value}:
        found["requests"] = given
    if settings.memory:
        found["limits"] = {"memory": settings.memory}
    return found


def readiness(port: int) -> Manifest:
    """Return a probe that is true once the supervisor listens (in its pod) or the agent is connected to it
    (in the others). It looks at the kernel's table of connections: a connection of its own would be one of a
    stranger at the control port."""
    number = f":{port:04X}"
    pattern = f"{number} [0-9A-F]+:[0-9A-F]{{4}} 0A|{number} 01"
    return {
        "exec": {"command": ["grep", "-qsE", pattern, "/proc/net/tcp", "/proc/net/tcp6"]},
        "periodSeconds": 5,
    }


def indexed_job(name: str, template: Manifest, nodes: int, retries: int) -> Manifest:
    """Return a Job with a pod per index. A failed pod comes again under its index; a command that was written
    wrongly (exit code 2) fails at once; pods that the cluster takes away, and those that saved and left
    because another one was, are not counted."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": retries,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": CONTAINER,
                            "operator": "In",
                            "values": [MISTAKE_EXIT_CODE],
                        },
                    },
                    {
                        "action": "Ignore",
                        "onExitCodes": {
                            "containerName": CONTAINER,
                            "operator": "In",
                            "values": [STOPPED_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE],
                        },
                    },
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": template,
        },
    }


def stateful_set(settings: PodSettings, name: str, template: Manifest, nodes: int) -> Manifest:
    """Return a StatefulSet; what ends in its pods is started again until the set is deleted."""
    template["spec"]["restartPolicy"] = "Always"
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": nodes,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {RUN_LABEL: name}},
            "template": template,
        },
    }


def headless_service(name: str, port: int) -> Manifest:
    """Return the Service by which pods have names; also before they are ready, else no agent finds the
    supervisor that waits for it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: name},
            "ports": [{"name": "control", "port": port, "targetPort": port}],
        },
    }


def secret_name(name: str) -> str:
    return f"{name}-token"


def labelled(manifest: Manifest, name: str, settings: PodSettings) -> Manifest:
    """Add the run's label and the namespace that the settings name."""
    metadata = manifest["metadata"]
    metadata["labels"] = {RUN_LABEL: name, **settings.labels}
    if settings.namespace:
        metadata["namespace"] = settings.namespace
    return manifest


def renamed(owner: Mapping[str, Any], name: str) -> Manifest:
    """Return a copy of a Job or a StatefulSet under another name. What a user chose may read like the name
    (a claim, a namespace, a label's value), and stays."""
    found: Manifest = deepcopy(dict(owner))
    metadata, spec = found["metadata"], found["spec"]
    template, pod = spec["template"], spec["template"]["spec"]
    metadata["name"] = name
    tables = [metadata["labels"], template["metadata"]["labels"]]
    tables += [one["labelSelector"]["matchLabels"] for one in pod["topologySpreadConstraints"]]
    if found["kind"] == "StatefulSet":
        spec["serviceName"] = name
        tables.append(spec["selector"]["matchLabels"])
    for labels in tables:
        labels[RUN_LABEL] = name
    for volume in pod["volumes"]:
        if volume["name"] == _TOKEN_VOLUME:
            volume["secret"]["secretName"] = secret_name(name)
    return found
