"""What is asked of Ray, as plain data, and whether a cluster could ever grant it. Pure: imports no Ray."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.core.errors import UsageError
from paceline.engines.batch import BatchSpec
from paceline.engines.engine import AgentSpec, EngineRequest
from paceline.engines.ray.ray_settings import RaySettings
from paceline.engines.time_limit import seconds_of

PYTHON: Final = "$PYTHON"
"""Stands in a command for the interpreter of the node's actor, which differs between nodes."""
TOKEN: Final = "$TOKEN"
"""Stands in a command for the file with the secret, which the actor makes."""

# Ray's own default of 3 s is shorter than a checkpoint may take.
_STOP_SECONDS: Final = "60"


def bundle_of(settings: RaySettings) -> dict[str, float]:
    """Return what Ray reserves for one agent."""
    bundle = {"CPU": float(settings.workers_per_node * settings.cpus_per_worker)}
    if settings.gpus_per_node:
        bundle["GPU"] = float(settings.gpus_per_node)
    return {**bundle, **{name: float(amount) for name, amount in settings.resources.items()}}


def agents_request(settings: RaySettings, agents: AgentSpec) -> EngineRequest:
    """Return the request for a run's agents."""
    bundle = bundle_of(settings)
    return {
        "engine": "ray",
        "run": agents.run,
        "address": settings.address,
        "nodes": agents.nodes,
        "max_nodes": settings.max_nodes,
        "one_per_node": not settings.share_nodes,
        "autoscales": settings.autoscales,
        # One group per agent: a group is placed whole or not at all, and does not grow.
        "placement_group": {"bundles": [bundle], "strategy": "SPREAD"},
        "actor": {**_actor_resources(bundle), "max_restarts": 0, "runtime_env": dict(settings.runtime_env)},
        "agent": {
            "command": agents.command(TOKEN, PYTHON),
            "folder": "" if "working_dir" in settings.runtime_env else agents.folder,
            "environment": dict(agents.environment),
            "keeps_threads": "OMP_NUM_THREADS" in settings.runtime_env.get("env_vars", {}),
        },
    }


def _actor_resources(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return a bundle in the words of an actor's options."""
    words = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    named = {words[name]: amount for name, amount in bundle.items() if name in words}
    return {**named, "resources": {name: amount for name, amount in bundle.items() if name not in words}}


def batch_request(settings: RaySettings, job: BatchSpec, further: Sequence[str]) -> EngineRequest:
    """Return the arguments of Ray's job submission. The head runs `paceline train`, which asks for agents.
    `further`: settings KEY=VALUE that `paceline train` has no option of its own for."""
    python, script = settings.python or job.python, job.script
    if job.folder and os.path.abspath(script).startswith(job.folder + os.sep):
        script = os.path.relpath(script, job.folder)  # the folder travels, and may lie elsewhere on the head
    command = [python, "-m", "paceline", "train", script, "--engine", "ray", "--address", "auto"]
    command += ["--nodes", str(job.nodes), "--workers-per-node", str(job.workers_per_node)]
    if job.gpus_per_node:
        command += ["--gpus-per-node", str(job.gpus_per_node)]
    for text in further:
        command += ["--engine-set", text]
    command += job.options
    if job.arguments:
        command += ["--", *job.arguments]
    if job.time:
        # Ray has no time limit of its own. SIGTERM: the run saves and leaves, with its own exit code.
        limit = str(seconds_of(job.time))
        limited = ["timeout", "--preserve-status", "--signal=TERM", f"--kill-after={_STOP_SECONDS}", limit]
        command = [*limited, *command]
    given = dict(settings.runtime_env)
    environment = {
        "RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS,
        **job.environment,
        **given.get("env_vars", {}),
    }
    runtime_env: dict[str, Any] = {**given, "env_vars": environment}
    if job.folder:
        runtime_env.setdefault("working_dir", job.folder)
    if job.image:
        runtime_env.setdefault("image_uri", job.image)
    entrypoint = shlex.join(command)
    if job.folder:
        # Where the head sees the folder itself, the run's results belong there and not into Ray's copy.
        entrypoint = f"cd {shlex.quote(job.folder)} 2>/dev/null; {entrypoint}"
    return {
        "entrypoint": entrypoint,
        "runtime_env": runtime_env,
        "metadata": {"name": job.name, "framework": "paceline"},
    }


def as_text(request: EngineRequest) -> str:
    """Return a request for people."""
    return json.dumps(request, indent=2, default=str) + "\n"


def check_capacity(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Raise UsageError where no node of the cluster is large enough for an agent, however idle; `nodes`: the
    resources of each."""
    if any(_fits(bundle, node) for node in nodes):
        return
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in bundle}
    short = [f"{name} {most[name]:g}" for name in bundle if most[name] < bundle[name]]
    found = f"the most that a node has is {', '.join(short)}" if short else "no node has all of these at once"
    raise UsageError(
        f"no node of the Ray cluster at {where} can hold an agent that needs {wanted}: {found} "
        f"({len(nodes)} nodes)",
        remedy="ask for fewer workers_per_node, cpus_per_worker, gpus_per_node or resources; with an "
        "autoscaler that adds such nodes, set autoscales=True",
    )


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in bundle.items())
