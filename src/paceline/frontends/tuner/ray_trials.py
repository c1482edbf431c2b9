"""Trials on a Ray cluster: each is a Ray task with its share of CPUs and GPUs, in a worker process of Ray's
that ends with it.

Reports go through one actor, the mailbox: a trial leaves a report there and waits for the answer where it
needs one; the search waits for tasks and for the mailbox at once. Ray neither repeats a trial nor decides
anything: a task whose worker or node died is a lost trial. When this process ends, Ray ends its tasks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Final, final

from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.wording import counted, first_line, listed
from paceline.engines.ray import ray_connection
from paceline.engines.ray.ray_settings import LOCAL, RaySettings
from paceline.frontends.tuner import trial_slots
from paceline.frontends.tuner.trial_engine import (
    LostTrial,
    Pruned,
    Raised,
    Reported,
    Returned,
    TrialCall,
    TrialEvent,
    TrialStart,
)
from paceline.frontends.tuner.trial_on_ray import Mailbox, MailedReport, run_on_ray
from paceline.frontends.tuner.trial_value import TrialResultError, TrialSetupError

_CLOSE_SECONDS: Final = 10.0
# Of paceline.Ray, what means something for trials; the rest is the size of agents, which trials have none of.
_SETTINGS: Final = ("name", "address", "runtime_env", "autoscales")


def settings_of(engine: object, address: object) -> RaySettings:
    """Return the settings of a search's `engine` and `ray_address`; ConfigError where one has no effect."""
    if address is not None and not isinstance(address, str):
        raise ConfigError(f"ray_address={address!r}", remedy='give "auto", "ray://HOST:10001", or None')
    if not isinstance(engine, RaySettings):
        # paceline.Ray() without an address reads RAY_ADDRESS; "ray" without one is a local cluster.
        return RaySettings(address=address or LOCAL)
    usual = RaySettings()
    useless = [
        one.name
        for one in fields(RaySettings)
        if one.name not in _SETTINGS and getattr(engine, one.name) != getattr(usual, one.name)
    ]
    if useless:
        raise ConfigError(
            f"paceline.Ray({useless[0]}={getattr(engine, useless[0])!r}) means nothing for trials",
            remedy=f"leave out {listed(useless)}; num_gpus and trials_per_gpu say what a trial has",
            key="engine",
        )
    return RaySettings(
        address=address or engine.address, runtime_env=engine.runtime_env, autoscales=engine.autoscales
    )


@contextmanager
def open_ray(
    call: TrialCall,
    settings: RaySettings,
    num_gpus: int | None,
    trials_per_gpu: float,
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[tuple[RayTrials, int]]:
    """Connect to a cluster, or use the connection that this process has; yield the engine and the number of
    trials at once."""
    # Whether a trial fits into the cluster is asked below; an agent's size means nothing here.
    with _connected(RaySettings(address=settings.address, autoscales=True)) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        cpus = int(sum(node.get("CPU", 0) for node in nodes)) or 1
        number = num_gpus if num_gpus is not None else gpus or cpus
        slots = trial_slots.slots_at_once(number, trials_per_gpu)
        if gpus:
            share = gpu_share(trials_per_gpu, nodes, autoscales=settings.autoscales)
        else:
            share = cpu_share(cpus, slots, autoscales=settings.autoscales)
            say(f"no GPU in the Ray cluster: {counted(slots, 'trial')} at once on CPUs")
            if sentence := describe_wait(share["num_cpus"], nodes):
                say(sentence)
        trials = RayTrials(ray, call, share, settings.runtime_env)
        try:
            yield trials, slots
        finally:
            trials.close()


@contextmanager
def _connected(settings: RaySettings) -> Iterator[Any]:
    """Yield Ray, connected. A connection or a local cluster that was made here ends with its last user."""
    connection = ray_connection.connect(settings)
    connection.users += 1
    try:
        yield connection.ray
    finally:
        connection.close()


def cpu_share(cpus: int, slots: int, *, autoscales: bool) -> dict[str, float]:
    """Return the CPUs of a trial. The nodes that an autoscaler is to add are not those of now."""
    return {"num_cpus": 1.0 if autoscales else max(0.01, min(1.0, cpus / slots))}


def gpu_share(
    trials_per_gpu: float, nodes: Sequence[Mapping[str, float]], *, autoscales: bool
) -> dict[str, float]:
    """Return the GPUs of a trial; UsageError where no node, however idle, can give them. `nodes`: the
    resources of each; `autoscales`: larger ones may come."""
    each = trial_slots.gpu_share(trials_per_gpu)
    most = max(node.get("GPU", 0.0) for node in nodes)
    if each > most and not autoscales:
        raise UsageError(
            f"a trial needs {each:g} GPUs of one node, and no node of the Ray cluster has more than {most:g}",
            remedy="raise trials_per_gpu, or add larger nodes; with an autoscaler that adds such nodes give "
            "engine=paceline.Ray(autoscales=True)",
        )
    return {"num_gpus": each}


def describe_wait(cpus: float, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the sentence about trials for which no present node, however idle, has the CPUs; "" where one
    has. Nodes may come, with an autoscaler or without."""
    most = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
    if cpus <= most:
        return ""
    total = sum(node.get("CPU", 0.0) for node in nodes)
    return (
        f"trials wait for a node to be added: each needs CPU {cpus:g}, and the Ray cluster's "
        f"{counted(len(nodes), 'node', 'has', 'have')} CPU {total:g}, at most {most:g} on one"
    )


@final
@dataclass(frozen=True)
class _RayAnswer:
    mailbox: Any
    ticket: int

    def __call__(self, prune: bool) -> None:
        self.mailbox.answer.remote(self.ticket, prune)


@final
class RayTrials:
    """The trials of one search on a Ray cluster."""

    def __init__(
        self, ray: Any, call: TrialCall, share: Mapping[str, float], runtime_env: Mapping[str, Any]
    ) -> None:
        self._ray = ray
        self._searched_in = os.getcwd()
        # max_calls=1: a worker's globals, modules and CUDA context are of one trial. max_retries=0: a lost
        # trial is the search's to repeat.
        task: dict[str, Any] = {"max_calls": 1, "max_retries": 0, "num_cpus": 0, **share}
        actor: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
        if runtime_env:
            # The mailbox is code of Paceline as well, which a node may have from there alone.
            task["runtime_env"] = actor["runtime_env"] = dict(runtime_env)
        try:
            self._task = ray.remote(**task)(run_on_ray)
            self._mailbox = _beside_search(ray.remote(**actor)(Mailbox), ray).remote()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Ray refuses this runtime_env for trials: {first_line(error)}",
                remedy="Ray sends folders along when it is connected, and then only: call "
                'ray.init(address=..., runtime_env={"working_dir": "."}) before tune()',
                key="engine",
            ) from error
        try:
            self._call = ray.put(call)
        except (TypeError, AttributeError) as error:
            raise UsageError(
                f"train_fn cannot be sent to Ray: {first_line(error)}",
                remedy="create in the function what cannot be pickled, or pass what it is made from",
            ) from error
        self._running: dict[Any, tuple[int, int]] = {}  # attempt and number, by task
        self._attempts = 0
        self._known = 0  # the last report that was read
        self._next = self._mailbox.reports_after.remote(0, True)

    def start(self, trial: TrialStart) -> None:
        self._attempts += 1
        task = self._task.remote(self._call, trial, self._attempts, self._mailbox, self._searched_in)
        self._running[task] = self._attempts, trial.number

    def wait(self, seconds: float | None = None) -> Sequence[TrialEvent]:
        ready, _ = self._ray.wait([self._next, *self._running], timeout=seconds)
        ended = [task for task in ready if task in self._running]
        events: list[TrialEvent] = []
        if self._next in ready:
            events += self._reports(self._next)
            self._next = self._mailbox.reports_after.remote(self._known, True)
        if ended:
            # A trial's reports are in the mailbox before its end is known here.
            events += self._reports(self._mailbox.reports_after.remote(self._known, False))
        return [*events, *(self._end_of(task) for task in ended)]

    def close(self) -> None:
        """End all trials, and the mailbox."""
        for task in self._running:
            with suppress(Exception):  # it ended meanwhile, or its node is gone
                self._ray.cancel(task, force=True)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_CLOSE_SECONDS)
        self._running.clear()
        self._ray.kill(self._mailbox)

    def _reports(self, asked: Any) -> list[TrialEvent]:
        errors = self._ray.exceptions
        try:
            found: list[MailedReport] = self._ray.get(asked)
        except errors.RayError as error:
            gone = UnavailableError(
                f"the Ray actor with the search's reports cannot be reached: {first_line(error)}",
                remedy="continue the study with resume=True (--resume)",
            )
            raise why_not_begun(error, errors) or gone from error
        # Others are of an attempt that is lost.
        running = dict(self._running.values())
        new = [one for one in found if one.ticket > self._known]
        self._known = max([self._known, *(one.ticket for one in new)])
        return [
            Reported(running[one.attempt], one.step, one.value, _RayAnswer(self._mailbox, one.ticket))
            for one in new
            if one.attempt in running
        ]

    def _end_of(self, task: Any) -> TrialEvent:
        _, number = self._running.pop(task)
        errors = self._ray.exceptions
        try:
            result = self._ray.get(task)
        except errors.RayError as error:
            if (ends_search := why_not_begun(error, errors)) is not None:
                return Raised(number, str(error), ends_search)
            return LostTrial(number, f"its Ray task ended with {type(error).__name__}: {first_line(error)}")
        if "ends_search" in result:
            kind = {one.__name__: one for one in (TrialResultError, TrialSetupError)}[result["kind"]]
            ends = kind(result["ends_search"], remedy=result["remedy"])
            return Raised(number, result["ends_search"], ends)
        if "error" in result:
            return Raised(number, result["error"])
        return Pruned(number) if result["value"] is None else Returned(number, result["value"])


def why_not_begun(error: Exception, errors: Any) -> UnavailableError | None:
    """Return the error of a node that can run no trial, from Ray's; None: a process or a node was lost."""
    if isinstance(error, errors.RuntimeEnvSetupError):
        return _unprepared("the trials' runtime_env cannot be set up", error)
    if isinstance(error, errors.RayActorError) and error.actor_init_failed:
        return _unprepared("the Ray actor for the search's reports cannot begin", error)
    if not isinstance(error, errors.RayTaskError):
        return None
    if isinstance(error.cause, errors.RaySystemError):
        # Of a worker that cannot load the call, most often for want of a module.
        return _unprepared("a Ray worker cannot load train_fn", error)
    if isinstance(error.cause, errors.RayError):
        return None  # such as a task that was cancelled
    # What a trial raises is caught in it: the worker cannot load Paceline, or not run it.
    return _unprepared("a Ray worker cannot begin a trial", error)


def _unprepared(what: str, error: Exception) -> UnavailableError:
    text = str(error).strip()
    *_, reason = text.splitlines() or [type(error).__name__]
    where = re.search(r"\bip=([\w.:]+)", text)
    return UnavailableError(
        f"{what}{f' on {where[1]}' if where else ''}: {reason.strip()}",
        remedy="install Paceline and what train_fn imports on all nodes, or send it along: "
        'engine=paceline.Ray(runtime_env={"pip": [...]}), or '
        'ray.init(address=..., runtime_env={"working_dir": "."}) before tune()',
    )


def _beside_search(actor: Any, ray: Any) -> Any:
    """Place an actor on the node to which the search is connected: the loss of another node, which costs its
    trials, must not cost the search."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True))
