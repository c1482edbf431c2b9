"""Manifests of a run that is handed over: the supervisor and its workers in pod 0, agents in the others,
which find it by the name that the headless Service gives it.

Pods of one Job have one command: each chooses its part by its index, which an Indexed Job writes into
JOB_COMPLETION_INDEX and a StatefulSet into the pod's name. A JobSet has a Job for each part.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

import yaml

from paceline.core.errors import UsageError
from paceline.engines.batch import BatchSpec
from paceline.engines.kubernetes.manifests import (
    KEPT_SECONDS,
    TOKEN_FILE,
    TOKEN_KEY,
    Manifest,
    container,
    headless_service,
    indexed_job,
    labelled,
    object_name,
    pod_template,
    secret_name,
    set_gpus,
    stateful_set,
)
from paceline.engines.kubernetes.pod_settings import PodSettings
from paceline.engines.time_limit import seconds_of

_WAIT_SECONDS: Final = 3600
HEAD: Final = "head"
_AGENTS: Final = "agents"


def batch_objects(settings: PodSettings, job: BatchSpec) -> list[Manifest]:
    """Return the objects of a run, the owner of its pods last. The Secret is not among them."""
    name = object_name(job.name)
    if settings.kind == "jobset":
        owner = _job_set(settings, job, name)
        others = []  # the JobSet's controller makes the Service
    elif settings.kind == "statefulset":
        template = _template(settings, job, name, _by_index(settings, job, name))
        owner = stateful_set(settings, name, template, job.nodes)
        others = [headless_service(name, settings.port)]
    else:
        template = _template(settings, job, name, _by_index(settings, job, name))
        template["spec"]["subdomain"] = name
        owner = indexed_job(name, template, job.nodes, settings.retries)
        # The run is over when its supervisor is, whatever agents do at that moment.
        owner["spec"]["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
        others = [headless_service(name, settings.port)]
    if job.time and settings.kind == "statefulset":
        raise UsageError(
            "a StatefulSet has no time limit", remedy='leave --time out, or use kind="job"', key="time"
        )
    if settings.kind == "job":
        owner["spec"] |= _deadline(job)
    return [labelled(one, name, settings) for one in (*others, owner)]


def to_yaml(settings: PodSettings, job: BatchSpec) -> str:
    """Return the objects as YAML. The token is not printed: the first lines say how to make it."""
    secret = secret_name(object_name(job.name))
    place = f" -n {settings.namespace}" if settings.namespace else ""
    lines = [
        "# The run's token is a Secret, which is not printed here; `paceline submit` makes it. By hand, "
        "before `kubectl apply`:",
        f"#   openssl rand -hex 32 | kubectl{place} create secret generic {secret} "
        f"--from-file={TOKEN_KEY}=/dev/stdin",
    ]
    objects = batch_objects(settings, job)
    # Without anchors: the parts of a manifest that are equal are written twice.
    text = yaml.dump_all(objects, Dumper=_ManifestDumper, sort_keys=False, explicit_start=True, width=110)
    return "\n".join(lines) + "\n" + text


def supervisor_command(settings: PodSettings, job: BatchSpec) -> list[str]:
    """Return the command of pod 0. `$POD_IP` is the shell's to replace."""
    options = list(job.options)
    if not _has(options, "--run-dir"):
        options += ["--run-dir", _run_folder(settings, job)]
    if not _has(options, "--resume"):
        options += ["--resume", "auto"]  # a pod that comes again goes on
    command = [settings.python, "-m", "paceline", "train", job.script, *options]
    command += ["--workers", str(job.nodes * job.workers_per_node)]
    care: dict[str, object] = {"port": settings.port, "token_file": TOKEN_FILE}
    if job.nodes > 1:
        care["joining_workers"] = (job.nodes - 1) * job.workers_per_node
    for name, value in care.items():
        command += ["--set", f"fault_tolerance.{name}={value}"]
    # The script and the file of settings may name the engine that they were handed over to.
    return [*command, "--set", "engine=none"]


def join_command(settings: PodSettings, job: BatchSpec, supervisor: str) -> list[str]:
    """Return the command of the other pods."""
    command = [settings.python, "-m", "paceline", "join", f"{supervisor}:{settings.port}"]
    command += ["--token-file", TOKEN_FILE, "--workers", str(job.workers_per_node)]
    return [*command, *job.agent_options, "--wait", str(_WAIT_SECONDS), "--until-finished"]


def _by_index(settings: PodSettings, job: BatchSpec, name: str) -> str:
    join = shlex.join(join_command(settings, job, f"{name}-0.{name}"))
    return (
        'case "${JOB_COMPLETION_INDEX:-${HOSTNAME##*-}}" in\n'
        f"0) {_train(settings, job)};;\n"
        f"*) exec {join};;\n"
        "esac\n"
    )


def _train(settings: PodSettings, job: BatchSpec) -> str:
    command = shlex.join(supervisor_command(settings, job))
    rest = f" -- {shlex.join(job.arguments)}" if job.arguments else ""
    return f'exec {command} --set "fault_tolerance.bind=$POD_IP"{rest}'


def _template(settings: PodSettings, job: BatchSpec, name: str, script: str) -> Manifest:
    image = job.image or settings.image
    # `exec` in the script: Python is process 1 and gets the SIGTERM.
    template = pod_template(settings, name, image, ["sh", "-c", script], settings.port, job.environment)
    container(template)["ports"] = [{"name": "control", "containerPort": settings.port}]
    set_gpus(template, job.gpus_per_node)
    return template


def _deadline(job: BatchSpec) -> Manifest:
    """Return the time limit of a Job; 0 is none, as with SLURM."""
    seconds = seconds_of(job.time) if job.time else 0
    return {"activeDeadlineSeconds": seconds} if seconds else {}


def _job_set(settings: PodSettings, job: BatchSpec, name: str) -> Manifest:
    supervisor = f"{name}-{HEAD}-0-0.{name}"
    parts = [(HEAD, 1, _train(settings, job))]
    if job.nodes > 1:
        join = shlex.join(join_command(settings, job, supervisor))
        parts.append((_AGENTS, job.nodes - 1, f"exec {join}"))
    jobs = []
    for part, nodes, script in parts:
        spec = indexed_job(name, _template(settings, job, name, script), nodes, settings.retries)["spec"]
        del spec["ttlSecondsAfterFinished"]  # the JobSet has it
        spec |= _deadline(job)
        jobs.append({"name": part, "replicas": 1, "template": {"spec": spec}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [HEAD]},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "replicatedJobs": jobs,
        },
    }


def _run_folder(settings: PodSettings, job: BatchSpec) -> str:
    """Return the run's folder: on the first volume, else in /tmp, which ends with the pod."""
    base = next(iter(settings.volumes), "/tmp/runs")
    return f"{base.rstrip('/')}/{object_name(job.name)}"


def _has(options: Sequence[str], name: str) -> bool:
    return any(option == name or option.startswith(f"{name}=") for option in options)


class _ManifestDumper(yaml.SafeDumper):
    """Writes texts of several lines as such, numbers of files in octal, and no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_ManifestDumper.add_representer(str, _text)
