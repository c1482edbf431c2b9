"""The server of asynchronous SGD: one thread that holds the parameters and serves every worker.

It never waits for one worker: a worker that computes for longer than its limit is killed and reported, and
its range goes to another. staleness.py decides which gradient is applied with which weight.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.aggregate.async_sgd.async_checkpointer import AsyncCheckpointer, Emit
from paceline.aggregate.async_sgd.gradient_exchange import SharedTensors, copy_all, send
from paceline.aggregate.async_sgd.staleness import GradientDecision, GradientLedger
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.core import events
from paceline.core.fd_messages import receive
from paceline.core.sandbox_fallbacks import open_process
from paceline.data.batch_plan import assign
from paceline.train.state.model_state import model_tensors
from paceline.train.step.weight_update import total_norm

_TICK_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 10.0  # for ranges in progress when a stop is requested
_SLOWER: Final = 20.0  # times the slowest range so far, beyond which a worker counts as hung


@final
@dataclass
class _WorkerConnection:
    worker: int
    sock: socket.socket
    memory: SharedTensors
    pid: int = 0  # 0: not ready yet
    host: str = ""
    handle: int = -1  # a descriptor of the process
    since: float = 0.0  # when its range was assigned
    counters: dict[str, Tensor] | None = None  # whole-number buffers as they were sent
    answer: Mapping[str, Any] | None = None  # the message that came with the gradient in its memory


@final
class GradientServer:
    """Server of gradients: serves until every range is applied, or until the caller asks to stop."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        ledger: GradientLedger,
        control: socket.socket,
        emit: Emit,
        *,
        checkpointer: AsyncCheckpointer,
        clip_norm: float | None,
        patience: float,
    ) -> None:
        self._optimizers, self._ledger = list(optimizers), ledger
        self._state = model_tensors(module)
        self._buffers = dict(module.named_buffers())
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._control, self._emit, self._checkpointer = control, emit, checkpointer
        self._clip_norm, self._patience = clip_norm, patience
        self._connections: dict[int, _WorkerConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self._slowest = 0.0  # seconds of the slowest range so far
        self._last = time.perf_counter()
        self.steps: list[events.StepCommitted] = []
        self.stopped: str | None = None
        self._stop_at = math.inf

    def serve(self) -> None:
        """Serve to the end; afterwards the last state is saved and every worker is dismissed."""
        self._selector.register(self._control, selectors.EVENT_READ, None)
        try:
            while not self._ledger.allocator.done and not (self.stopped is not None and self._idle):
                for key, _ in self._selector.select(_TICK_SECONDS):
                    self._handle(key.data)
                self._apply_ready()
                self._assign_ranges()
                self._kill_hung()
                self._checkpointer.poll()
            for connection in self._connections.values():
                # Workers exit by themselves; the caller ends those that do not.
                send(connection.sock, {"type": "end"})
        finally:
            for connection in list(self._connections.values()):
                self._disconnect(connection)
            self._selector.close()
        self._checkpointer.finish(self._info())

    @property
    def _idle(self) -> bool:
        late = time.monotonic() > self._stop_at + _STOP_SECONDS
        return late or not any(self._ledger.is_computing(worker) for worker in self._connections)

    def _stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped, self._stop_at = reason, time.monotonic()

    # messages

    def _handle(self, connection: _WorkerConnection | None) -> None:
        if connection is None:
            self._handle_caller()
        elif self._connections.get(connection.worker) is connection:
            self._handle_worker(connection)

    def _handle_caller(self) -> None:
        received = receive(self._control)
        if received is None:
            self._selector.unregister(self._control)
            self._stop("the process that started it is gone")
            return
        message, descriptors = received
        worker = message.get("worker", -1)
        present = self._connections.get(worker)
        if message["type"] == "join":
            if present is not None:
                self._lose(present, "another process takes its slot")
            sock, memory = socket.socket(fileno=descriptors[0]), descriptors[1]
            shared = SharedTensors(memory, self._state, list(self._trained))
            os.close(memory)
            connection = self._connections[worker] = _WorkerConnection(worker, sock, shared)
            self._selector.register(sock, selectors.EVENT_READ, connection)
        elif message["type"] == "lost" and present is not None:
            present.pid = present.pid or message["pid"]
            self._lose(present, message["reason"], cause=message["cause"])
        elif message["type"] == "stop":
            self._stop(message["reason"])

    def _handle_worker(self, connection: _WorkerConnection) -> None:
        received = receive(connection.sock)
        if received is None:
            self._lose(connection, "its connection closed")
            return
        message = received[0]
        if message["type"] == "ready":
            self._admit(connection, message)
        else:
            connection.answer = message
            if not self._slowest:
                send(self._control, {"type": "first_gradient"})
            self._slowest = max(self._slowest, message["seconds"])
            self._ledger.submit(connection.worker)

    # coming and going

    def _admit(self, connection: _WorkerConnection, message: Mapping[str, Any]) -> None:
        worker, connection.pid, connection.host = connection.worker, message["pid"], message["host"]
        with contextlib.suppress(OSError):
            connection.handle = open_process(connection.pid)
        self._emit(
            events.WorkerStarted(time=time.time(), rank=worker, pid=connection.pid, host=connection.host)
        )
        if self._generation or len(self._ready) == self._ledger.workers:
            self._emit_view(f"worker {worker} joined")

    def _lose(self, connection: _WorkerConnection, reason: str, *, cause: str = "crash") -> None:
        assignment = self._ledger.remove(connection.worker)
        self._disconnect(connection)
        if connection.pid:
            self._emit(
                events.WorkerFailed(
                    time=time.time(),
                    rank=connection.worker,
                    pid=connection.pid,
                    phase="waiting" if assignment is None else "computing",
                    reason=reason,
                    host=connection.host,
                    cause=cause,
                )
            )
            self._emit_view(f"worker {connection.worker} is lost")

    def _disconnect(self, connection: _WorkerConnection) -> None:
        self._connections.pop(connection.worker, None)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.handle >= 0:
            os.close(connection.handle)
            connection.handle = -1

    def _kill_hung(self) -> None:
        now = time.monotonic()
        limit = max(self._patience, _SLOWER * self._slowest)
        for connection in list(self._connections.values()):
            silent = now - connection.since
            if not self._ledger.is_computing(connection.worker) or silent < limit:
                continue
            reason = f"silent for {silent:.1f} s, and the slowest range took {self._slowest:.1f} s"
            # Through its descriptor: the pid could belong to another process by now.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(connection.handle, signal.SIGKILL)
            self._lose(connection, reason, cause="hung")

    # ranges and gradients

    @property
    def _ready(self) -> list[_WorkerConnection]:
        return [connection for _, connection in sorted(self._connections.items()) if connection.pid]

    def _assign_ranges(self) -> None:
        if self.stopped is not None:
            return
        for connection in self._ready:
            if connection.worker in self._ledger.assigned:
                continue
            assignment = self._ledger.assign(connection.worker)
            if assignment is None:
                return
            copy_all(connection.memory.state, self._state)
            connection.counters = {
                name: buffer.clone()
                for name, buffer in self._buffers.items()
                if not buffer.is_floating_point()
            }
            connection.since = time.monotonic()
            part, version = assignment.part, assignment.version
            order = {"type": "compute", "epoch": part.epoch, "start": part.start, "stop": part.stop}
            # The end of a worker that is gone by now is read in the next round.
            send(connection.sock, {**order, "version": version})

    def _apply_ready(self) -> None:
        while (worker := self._ledger.next_ready()) is not None:
            connection = self._connections[worker]
            answer, connection.answer = connection.answer, None
            assert answer is not None
            gradients = self._load_gradients(connection, answer["unused"])
            norm = float(total_norm(gradients))
            finite = math.isfinite(norm) and math.isfinite(answer["loss"])
            decision = self._ledger.decide(worker, finite=finite)
            if decision.weight is not None:
                if self._clip_norm is not None and norm > self._clip_norm:
                    torch._foreach_mul_(gradients, self._clip_norm / (norm + 1e-6))
                rate = self._update(decision.weight)
                self._update_buffers(connection, decision.weight)
                self._record(worker, decision, decision.weight, answer, rate, norm)
            for parameter in self._trained.values():
                parameter.grad = None

    def _load_gradients(self, connection: _WorkerConnection, unused: Sequence[int]) -> list[Tensor]:
        left_out = set(unused)
        for index, (name, parameter) in enumerate(self._trained.items()):
            parameter.grad = None if index in left_out else connection.memory.gradients[name]
        return [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]

    def _record(
        self,
        worker: int,
        decision: GradientDecision,
        weight: float,
        answer: Mapping[str, Any],
        rate: float,
        norm: float,
    ) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        part = decision.assignment.part
        event = events.StepCommitted(
            time=time.time(),
            step=self._ledger.version,
            epoch=part.epoch,
            loss=answer["loss"],
            samples=answer["count"],
            seconds=seconds,
            offset=part.start,
            taken=part.count,
            learning_rate=rate,
            grad_norm=norm,
            metrics={
                "worker": float(worker),
                "staleness": float(decision.staleness),
                "weight": weight,
                "worker_seconds": answer["seconds"],
            },
            generation=self._generation,
        )
        self.steps.append(event)
        self._emit(event)
        self._checkpointer.after_step(self._info())

    def _update(self, weight: float) -> float:
        """Step the optimizers with their learning rates times `weight`; return the first of these rates."""
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
    def _update_buffers(self, connection: _WorkerConnection, weight: float) -> None:
        """Move statistics towards the worker's by the gradient's weight, counters by what it counted."""
        for name, buffer in self._buffers.items():
            theirs = connection.memory.state[name]
            if buffer.is_floating_point():
                buffer.lerp_(theirs, min(weight, 1.0))
            elif buffer.dtype == torch.bool or connection.counters is None:
                buffer.copy_(theirs)
            else:
                buffer.add_(theirs - connection.counters[name])

    # what is recorded

    def _info(self) -> CheckpointInfo:
        allocator = self._ledger.allocator
        return CheckpointInfo(
            step=self._ledger.version,
            epoch=allocator.completed,
            samples=allocator.settled,
            workers=max(len(self._ready), 1),
            metrics={"train_loss": self.steps[-1].loss} if self.steps else {},
        )

    def _emit_view(self, reason: str) -> None:
        self._generation += 1
        ready = self._ready
        blocks = assign(self._ledger.workers, len(ready)) if ready else []
        self._emit(
            events.ViewChanged(
                time=time.time(),
                generation=self._generation,
                reason=reason,
                members=[connection.worker for connection in ready],
                shards=[list(block) for block in blocks],
                pids=[connection.pid for connection in ready],
                hosts=[connection.host for connection in ready],
                step=self._ledger.version,
            )
        )
