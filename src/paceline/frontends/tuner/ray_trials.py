"""Trials on a Ray cluster: each is a Ray task with its share of CPUs and GPUs, in a worker process of Ray's.

Reports go through one actor, the mailbox: a trial leaves a report there and waits for the answer where it
needs one; the search waits for tasks and for the mailbox at once. Ray neither repeats a trial nor decides
anything: a task whose worker or node died is a lost trial. When this process ends, Ray ends its tasks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import first_line
from paceline.engines.local import failure_report
from paceline.engines.ray import ray_connection
from paceline.engines.ray.ray_settings import RaySettings
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
from paceline.frontends.tuner.trial_process import OUTPUT, run_trial
from paceline.frontends.tuner.trial_value import TrialResultError

_CLOSE_SECONDS: Final = 10.0


@contextmanager
def open_ray(
    call: TrialCall, address: str | None, num_gpus: int | None, trials_per_gpu: float
) -> Iterator[tuple[RayTrials, int]]:
    """Connect to a cluster, or use the connection that this process has; yield the engine and the number of
    trials at once. `address` is that of `paceline.Ray`."""
    if address is not None and not isinstance(address, str):
        raise ConfigError(f"ray_address={address!r}", remedy='give "auto", "ray://HOST:10001", or None')
    # Whether a trial fits into the cluster is asked below; an agent's size means nothing here.
    with _connected(RaySettings(address=address, autoscales=True)) as ray:
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        number = num_gpus if num_gpus is not None else gpus or cpus
        slots = trial_slots.slots_at_once(number, trials_per_gpu)
        share = _share(number, trials_per_gpu, gpus, cpus)
        trials = RayTrials(ray, call, share)
        try:
            yield trials, slots
        finally:
            trials.close()


@contextmanager
def _connected(settings: RaySettings) -> Iterator[Any]:
    """Yield Ray, connected. A connection or a local cluster that was made here ends with the block."""
    ray = ray_connection.import_ray()
    if ray.is_initialized():
        yield ray
        return
    connection = ray_connection.connect(settings)
    connection.users += 1
    try:
        yield ray
    finally:
        connection.close()


def _share(number: int, trials_per_gpu: float, gpus: int, cpus: int) -> dict[str, float]:
    """Return the resources of a trial; UsageError where the cluster can never give them."""
    if not gpus:
        return {"num_cpus": max(0.01, min(1.0, cpus / trial_slots.slots_at_once(number, trials_per_gpu)))}
    each = 1.0 / trials_per_gpu
    if each > gpus:
        raise UsageError(
            f"a trial needs {each:g} GPUs, and the Ray cluster has {gpus}",
            remedy="raise trials_per_gpu, or add nodes",
        )
    return {"num_gpus": each}


@final
@dataclass(frozen=True)
class MailedReport:
    """A report in the mailbox. `ticket` counts reports; `attempt` counts the trials that were started."""

    ticket: int
    attempt: int
    step: int
    value: float


@final
class Mailbox:
    """Reports on their way to the search, and answers on their way back; an asynchronous actor."""

    def __init__(self) -> None:
        self._reports: list[MailedReport] = []
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._count = 0
        self._arrived = asyncio.Event()

    async def report(self, attempt: int, step: int, value: float, waits: bool) -> bool:
        """Leave a report of a trial; wait for its answer where it needs one."""
        self._count += 1
        ticket = self._count
        self._reports.append(MailedReport(ticket, attempt, step, value))
        self._arrived.set()
        if not waits:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        return await answer

    async def reports_after(self, ticket: int, wait: bool) -> list[MailedReport]:
        """Return the reports after this one, which is known; `wait` until there is one."""
        self._reports = [one for one in self._reports if one.ticket > ticket]
        while wait and not self._reports:
            self._arrived.clear()
            await self._arrived.wait()
            self._reports = [one for one in self._reports if one.ticket > ticket]
        return list(self._reports)

    async def answer(self, ticket: int, prune: bool) -> None:
        """Answer a report."""
        waiting = self._answers.pop(ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(prune)


def run_on_ray(call: TrialCall, start: TrialStart, attempt: int, mailbox: Any) -> dict[str, Any]:
    """Run one trial in this Ray worker; return its value, or how it failed, as plain data."""
    import ray

    def send(step: int, value: float) -> bool:
        return bool(ray.get(mailbox.report.remote(attempt, step, value, call.waits_for_answers)))

    # On a cluster without a shared file system the folder is the node's own.
    folder = Path(start.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        open(folder / OUTPUT, "a", encoding="utf-8") as output,
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        try:
            return {"value": run_trial(call, start, send)}
        except TrialResultError as error:
            return {"ends_search": error.message, "remedy": error.remedy}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return {"error": failure_report.describe(error).traceback_text}


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

    def __init__(self, ray: Any, call: TrialCall, share: dict[str, float]) -> None:
        self._ray = ray
        # max_retries=0: a lost trial is the search's to repeat.
        self._task = ray.remote(max_retries=0, **{"num_cpus": 0, **share})(run_on_ray)
        self._mailbox = _beside_search(ray.remote(num_cpus=0, max_concurrency=1000)(Mailbox), ray).remote()
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
        placed = replace(trial, folder=os.path.abspath(trial.folder))
        if trial.parent_folder:
            placed = replace(placed, parent_folder=os.path.abspath(trial.parent_folder))
        self._attempts += 1
        task = self._task.remote(self._call, placed, self._attempts, self._mailbox)
        self._running[task] = self._attempts, trial.number

    def wait(self, seconds: float | None = None) -> Sequence[TrialEvent]:
        ready, _ = self._ray.wait([self._next, *self._running], timeout=seconds)
        ended = [task for task in ready if task in self._running]
        events: list[TrialEvent] = []
        if self._next in ready:
            events += self._reports(self._ray.get(self._next))
            self._next = self._mailbox.reports_after.remote(self._known, True)
        if ended:
            # A trial's reports are in the mailbox before its end is known here.
            events += self._reports(self._ray.get(self._mailbox.reports_after.remote(self._known, False)))
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

    def _reports(self, found: list[MailedReport]) -> list[TrialEvent]:
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
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return LostTrial(number, f"its Ray task ended with {type(error).__name__}: {first_line(error)}")
        if "ends_search" in result:
            ends = TrialResultError(result["ends_search"], remedy=result["remedy"])
            return Raised(number, result["ends_search"], ends)
        if "error" in result:
            return Raised(number, result["error"])
        return Pruned(number) if result["value"] is None else Returned(number, result["value"])


def _beside_search(actor: Any, ray: Any) -> Any:
    """Place an actor on the node to which the search is connected: the loss of another node, which costs its
    trials, must not cost the search."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True))
