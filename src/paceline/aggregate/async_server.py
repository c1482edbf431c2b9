"""The server of asynchronous SGD: one thread that holds the parameters and listens to everybody.

It never waits for one worker: a worker that is silent for longer than its time is killed and reported, and
its range goes to another. What to apply and with which weight is decided in async_sgd. Must not know how
processes are started, how samples are read, nor what is in a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.aggregate.async_memory import SharedMemory, copy_all, state_of
from paceline.aggregate.async_messages import receive, send
from paceline.aggregate.async_saving import Keeper
from paceline.aggregate.async_sgd import Desk, Judgement
from paceline.checkpoint.manifest import Info
from paceline.core import events
from paceline.core.system_calls import open_process
from paceline.data.plan import deal

Tell = Callable[[events.Event], None]

_TICK_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 10.0  # for ranges that are under way when it is told to stop
# A worker may take so many times as long as the slowest range so far.
_SLOWER: Final = 20.0


@dataclass(frozen=True)
class Learned:
    """One applied gradient."""

    step: int
    epoch: int
    loss: float
    samples: int
    seconds: float
    learning_rate: float
    grad_norm: float


@final
@dataclass
class _Member:
    worker: int
    sock: socket.socket
    memory: SharedMemory
    joined: float
    pid: int = 0
    host: str = ""
    handle: int = -1  # a descriptor of the process
    since: float = 0.0  # when it got what it computes
    counters: dict[str, Tensor] | None = None  # whole-number buffers as they were handed out
    heard: Mapping[str, Any] | None = None  # what it said with the gradient that is there


@final
class Server:
    """Serves until everything is learned, or until it is told to stop."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        desk: Desk,
        control: socket.socket,
        tell: Tell,
        *,
        keeper: Keeper | None,
        workers: int,
        clip_norm: float | None = None,
        patience: float = 60.0,
    ) -> None:
        self._module, self._optimizers, self._desk = module, list(optimizers), desk
        self._state = state_of(module)
        self._buffers = dict(module.named_buffers())
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._control, self._tell, self._keeper = control, tell, keeper
        self._workers, self._clip_norm, self._patience = workers, clip_norm, patience
        self._members: dict[int, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self._slowest = 0.0
        self._last = time.perf_counter()
        self.steps: list[Learned] = []
        self.stopped: str | None = None
        self._stop_at = math.inf

    def serve(self) -> None:
        """To the end; afterwards the last state is saved and no worker has work."""
        self._selector.register(self._control, selectors.EVENT_READ, None)
        try:
            while not self._desk.dealer.done and not (self.stopped is not None and self._idle):
                self._listen(_TICK_SECONDS)
                self._judge_all()
                self._hand_out_all()
                self._look_for_silence()
                if self._keeper is not None:
                    self._keeper.settle()
            for member in self._members.values():
                # They end by themselves; whoever does not is the caller's to end.
                send(member.sock, {"do": "end"})
        finally:
            for member in list(self._members.values()):
                self._leave(member)
            self._selector.close()
        if self._keeper is not None:
            self._keeper.finish(self._info())

    @property
    def _idle(self) -> bool:
        late = time.monotonic() > self._stop_at + _STOP_SECONDS
        return late or not any(self._desk.computes(worker) for worker in self._members)

    def _stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped, self._stop_at = reason, time.monotonic()

    # listening

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            member: _Member | None = key.data
            if member is None:
                self._hear_caller()
            elif self._members.get(member.worker) is member:
                self._hear(member)

    def _hear_caller(self) -> None:
        heard = receive(self._control)
        if heard is None:
            self._selector.unregister(self._control)
            self._stop("the process that started it is gone")
            return
        message, descriptors = heard
        worker = message.get("worker", -1)
        present = self._members.get(worker)
        if message["do"] == "join":
            if present is not None:
                self._lose(present, "another process takes its place")
            sock, memory = socket.socket(fileno=descriptors[0]), descriptors[1]
            shared = SharedMemory(memory, self._state, list(self._trained))
            os.close(memory)
            member = self._members[worker] = _Member(worker, sock, shared, time.monotonic())
            self._selector.register(sock, selectors.EVENT_READ, member)
        elif message["do"] == "lost" and present is not None:
            present.pid = present.pid or message["pid"]
            self._lose(present, message["reason"], cause=message["cause"])
        elif message["do"] == "stop":
            self._stop(message["reason"])

    def _hear(self, member: _Member) -> None:
        heard = receive(member.sock)
        if heard is None:
            self._lose(member, "its connection closed")
            return
        message = heard[0]
        if message["say"] == "ready":
            self._welcome(member, message)
        else:
            member.heard = message
            if not self._slowest:
                send(self._control, {"say": "learned", "worker": member.worker})
            self._slowest = max(self._slowest, message["seconds"])
            self._desk.hand_in(member.worker)

    def _welcome(self, member: _Member, message: Mapping[str, Any]) -> None:
        member.pid, member.host = message["pid"], message["host"]
        with contextlib.suppress(OSError):
            member.handle = open_process(member.pid)
        send(self._control, {"say": "joined", "worker": member.worker, "pid": member.pid})
        self._tell(
            events.WorkerStarted(time=time.time(), rank=member.worker, pid=member.pid, host=member.host)
        )
        if self._generation or len(self._ready) == self._workers:
            self._tell_view(f"worker {member.worker} joined")

    # losing

    def _lose(self, member: _Member, reason: str, *, cause: str = "crash") -> None:
        work = self._desk.forget(member.worker)
        self._leave(member)
        if member.pid:
            phase = "computing" if work is not None else "waiting"
            self._tell(
                events.WorkerFailed(
                    time=time.time(),
                    rank=member.worker,
                    pid=member.pid,
                    phase=phase,
                    reason=reason,
                    host=member.host,
                    cause=cause,
                )
            )
            self._tell_view(f"worker {member.worker} is lost")

    def _leave(self, member: _Member) -> None:
        self._members.pop(member.worker, None)
        self._selector.unregister(member.sock)
        member.sock.close()
        if member.handle >= 0:
            os.close(member.handle)
            member.handle = -1

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        limit = max(self._patience, _SLOWER * self._slowest)
        for member in list(self._members.values()):
            if not self._desk.computes(member.worker) or now - member.since < limit:
                continue
            reason = (
                f"silent for {now - member.since:.1f} s, and the slowest range took {self._slowest:.1f} s"
            )
            # Through its descriptor: a number could belong to another process by now.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(member.handle, signal.SIGKILL)
            send(self._control, {"say": "hung", "worker": member.worker, "pid": member.pid, "reason": reason})
            self._lose(member, reason, cause="hung")

    # working

    @property
    def _ready(self) -> list[_Member]:
        return [member for _, member in sorted(self._members.items()) if member.pid]

    def _hand_out_all(self) -> None:
        if self.stopped is not None:
            return
        for member in self._ready:
            if member.worker in self._desk.under_way:
                continue
            work = self._desk.hand_out(member.worker)
            if work is None:
                return
            copy_all(member.memory.state, self._state)
            member.counters = {
                name: buffer.clone()
                for name, buffer in self._buffers.items()
                if not buffer.is_floating_point()
            }
            member.since = time.monotonic()
            part = work.part
            order = {"do": "compute", "epoch": part.epoch, "start": part.start, "stop": part.stop}
            # One that is gone by now is heard of in the next round.
            send(member.sock, {**order, "version": work.version})

    def _judge_all(self) -> None:
        while (worker := self._desk.next_ready()) is not None:
            member = self._members[worker]
            assert member.heard is not None
            heard, member.heard = member.heard, None
            gradients = self._take_gradients(member, heard["unused"])
            norm = _norm(gradients)
            judged = self._desk.judge(worker, finite=math.isfinite(norm) and math.isfinite(heard["loss"]))
            if judged.weight is not None:
                self._apply(member, judged, heard, gradients, norm)
            for parameter in self._trained.values():
                parameter.grad = None

    def _take_gradients(self, member: _Member, unused: Sequence[int]) -> list[Tensor]:
        left_out = set(unused)
        gradients = []
        for place, (name, parameter) in enumerate(self._trained.items()):
            parameter.grad = None if place in left_out else member.memory.gradients[name]
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        return gradients

    def _apply(
        self,
        member: _Member,
        judged: Judgement,
        heard: Mapping[str, Any],
        gradients: Sequence[Tensor],
        norm: float,
    ) -> None:
        assert judged.weight is not None
        if self._clip_norm is not None and norm > self._clip_norm:
            torch._foreach_mul_(list(gradients), self._clip_norm / (norm + 1e-6))
        rate = self._step(judged.weight)
        self._take_buffers(member, judged.weight)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        part = judged.work.part
        learned = Learned(self._desk.version, part.epoch, heard["loss"], heard["count"], seconds, rate, norm)
        self.steps.append(learned)
        self._tell(
            events.StepCommitted(
                time=time.time(),
                step=learned.step,
                epoch=learned.epoch,
                loss=learned.loss,
                samples=learned.samples,
                seconds=seconds,
                offset=part.start,
                taken=part.count,
                learning_rate=rate,
                grad_norm=norm,
                metrics={
                    "worker": float(member.worker),
                    "staleness": float(judged.staleness),
                    "weight": judged.weight,
                    "worker_seconds": heard["seconds"],
                },
                generation=self._generation,
            )
        )
        if self._keeper is not None:
            self._keeper.look(self._info())

    def _step(self, weight: float) -> float:
        """One step with learning rates times `weight`: a factor of the gradient would mean nothing to
        optimizers that divide by its size."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * weight
        for optimizer in self._optimizers:
            optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return float(rates[0]) * weight

    @torch.no_grad()
    def _take_buffers(self, member: _Member, weight: float) -> None:
        """Statistics move towards the worker's by the gradient's weight; counters by what it counted."""
        for name, buffer in self._buffers.items():
            theirs = member.memory.state[name]
            if buffer.is_floating_point():
                buffer.lerp_(theirs, min(weight, 1.0))
            elif buffer.dtype == torch.bool or member.counters is None:
                buffer.copy_(theirs)
            else:
                buffer.add_(theirs - member.counters[name])

    # telling

    def _info(self) -> Info:
        dealer = self._desk.dealer
        loss = {"train_loss": self.steps[-1].loss} if self.steps else {}
        return Info(
            step=self._desk.version,
            epoch=dealer.completed,
            samples=dealer.settled,
            workers=max(len(self._ready), 1),
            metrics=loss,
        )

    def _tell_view(self, reason: str) -> None:
        self._generation += 1
        ready = self._ready
        blocks = deal(self._workers, len(ready)) if ready else []
        self._tell(
            events.ViewChanged(
                time=time.time(),
                generation=self._generation,
                reason=reason,
                members=[member.worker for member in ready],
                shards=[list(block) for block in blocks],
                pids=[member.pid for member in ready],
                hosts=[member.host for member in ready],
                step=self._desk.version,
            )
        )


def _norm(gradients: Sequence[Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = [norm.float() for norm in torch._foreach_norm(list(gradients))]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
