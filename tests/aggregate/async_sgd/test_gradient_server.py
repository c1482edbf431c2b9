"""The server and workers of asynchronous SGD over real sockets and shared memory; workers are threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from tests.waiting import wait_for
from torch import Tensor, nn

from paceline.aggregate.async_sgd.async_checkpointer import AsyncCheckpointer
from paceline.aggregate.async_sgd.gradient_exchange import send, work
from paceline.aggregate.async_sgd.gradient_server import GradientServer
from paceline.aggregate.async_sgd.range_allocator import RangeAllocator, SampleRange
from paceline.aggregate.async_sgd.staleness import GradientLedger, Staleness
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.core.fd_messages import pair, receive

SAMPLES, BATCH, EPOCHS = 24, 4, 2
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])


def model(*, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)) if norm else nn.Linear(3, 1)


Seen = Counter[tuple[int, int]]


def compute_on(module: nn.Module, seen: Seen | None = None) -> Callable[[SampleRange], tuple[float, int]]:
    def compute(part: SampleRange) -> tuple[float, int]:
        x, y = X[part.start : part.stop], Y[part.start : part.stop]
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        if seen is not None:
            seen.update((part.epoch, place) for place in range(part.start, part.stop))
        return float(loss.detach()), len(x)

    return compute


class NoCheckpoints:
    """In place of an AsyncCheckpointer, where nothing is saved."""

    def poll(self) -> None: ...

    def after_step(self, info: CheckpointInfo) -> None: ...

    def finish(self, info: CheckpointInfo) -> None: ...


class Running:
    """A server in a thread, and what it said."""

    def __init__(self, module: nn.Module, stack: ExitStack, workers: int, **settings: Any) -> None:
        self.told: list[events.Event] = []
        self.control, far = pair()
        stack.enter_context(self.control)
        self._far = stack.enter_context(far)
        self.ledger = GradientLedger(
            RangeAllocator(SAMPLES, EPOCHS, BATCH), settings.pop("staleness", Staleness()), workers
        )
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
        make = settings.pop("checkpointer", lambda _: NoCheckpoints())
        self.checkpointer = make(self)
        self.server = GradientServer(
            module,
            [optimizer],
            self.ledger,
            far,
            self.told.append,
            checkpointer=self.checkpointer,
            **{"clip_norm": None, "patience": 60.0, **settings},
        )
        self._stack = stack
        self.threads: list[threading.Thread] = []
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def join(self, number: int) -> tuple[socket.socket, int]:
        """A worker's socket and memory file."""
        theirs, mine = pair()
        memory = os.memfd_create("test")
        with theirs:
            send(self.control, {"type": "join", "worker": number}, (theirs.fileno(), memory))
        self._stack.enter_context(mine)
        self._stack.callback(os.close, memory)
        return mine, memory

    def work(
        self, number: int, module: nn.Module, compute: Callable[[SampleRange], tuple[float, int]]
    ) -> None:
        sock, memory = self.join(number)
        self.threads.append(threading.Thread(target=work, args=(sock, memory, module, compute)))
        self.threads[-1].start()

    def of(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


@contextmanager
def running(module: nn.Module, workers: int = 1, **settings: Any) -> Iterator[Running]:
    with ExitStack() as stack:
        it = Running(module, stack, workers, **settings)
        try:
            yield it
            it.thread.join(60)
            assert not it.thread.is_alive()
        finally:
            send(it.control, {"type": "stop", "reason": "the test is over"})
            for thread in (it.thread, *it.threads):
                thread.join(60)


def plain_sgd(norm: Tensor | None = None, clip: float | None = None) -> nn.Module:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    compute = compute_on(module)
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            compute(SampleRange(epoch, start, start + BATCH))
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return module


@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_worker_is_plain_sgd(clip):
    held = model()
    with running(held, clip_norm=clip) as it:
        worker = model()
        it.work(0, worker, compute_on(worker))
    expected = plain_sgd(clip=clip)
    for name, value in held.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])
    steps = it.of(events.StepCommitted)
    assert [event.step for event in steps] == list(range(1, 13))
    assert [(event.epoch, event.offset, event.taken) for event in steps[:2]] == [(0, 0, 4), (0, 4, 4)]
    assert {event.metrics["staleness"] for event in steps} == {0.0}
    assert it.ledger.total.samples == SAMPLES * EPOCHS


def test_a_worker_that_goes_away_loses_its_range_and_nothing_else():
    held = model()
    seen: Seen = Counter()
    with running(held, workers=2) as it:
        sock, _ = it.join(0)
        send(sock, {"type": "ready", "pid": os.getpid(), "host": "here"})
        heard = receive(sock)
        assert heard is not None
        assert heard[0]["type"] == "compute"
        sock.close()
        worker = model()
        it.work(1, worker, compute_on(worker, seen))
    assert seen == {(epoch, place): 1 for epoch in range(EPOCHS) for place in range(SAMPLES)}
    (failed,) = it.of(events.WorkerFailed)
    assert (failed.rank, failed.phase) == (0, "computing")
    assert it.ledger.statistics()["workers"]["0"]["lost"] == 1
    assert it.of(events.ViewChanged)[-1].members == [1]
    assert it.of(events.ViewChanged)[-1].shards == [[0, 1]]


def test_a_stale_gradient_takes_a_smaller_step():
    held = model()
    with running(held, workers=2) as it:
        slow, fast = model(), model()
        order = [threading.Event() for _ in range(2)]

        def wait_first(part: SampleRange) -> tuple[float, int]:
            order[0].set()
            assert order[1].wait(30)
            return compute_on(slow)(part)

        def then_let_go(part: SampleRange) -> tuple[float, int]:
            assert order[0].wait(30)
            done = compute_on(fast)(part)
            committed = it.of(events.StepCommitted)
            if len(committed) >= 2 and not order[1].is_set():
                order[1].set()
                # Without the wait, this worker could commit so many ranges that the old gradient is dropped.
                wait_for(lambda: len(it.of(events.StepCommitted)) > len(committed), "the old gradient")
            return done

        it.work(0, slow, wait_first)
        it.work(1, fast, then_let_go)
    stale = [event for event in it.of(events.StepCommitted) if event.metrics["staleness"] > 0]
    assert stale
    for event in stale:
        assert event.metrics["weight"] == 1 / (1 + event.metrics["staleness"])
        assert event.learning_rate == pytest.approx(0.1 * event.metrics["weight"])


def test_gradients_that_are_not_finite_do_not_reach_the_weights():
    held = model()
    before = {name: value.clone() for name, value in held.state_dict().items()}
    with running(held) as it:
        worker = model()

        def broken(part: SampleRange) -> tuple[float, int]:
            for parameter in worker.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            return 1.0, part.count

        it.work(0, worker, broken)
    for name, value in held.state_dict().items():
        assert torch.equal(value, before[name])
    assert it.ledger.total.not_finite == 12


def test_buffers_follow_and_unused_parameters_stay():
    held = model(norm=True)
    held.register_parameter("unused", nn.Parameter(torch.ones(2)))
    with running(held) as it:
        worker = model(norm=True)
        worker.register_parameter("unused", nn.Parameter(torch.ones(2)))
        it.work(0, worker, compute_on(worker))
    state = held.state_dict()
    assert int(state["0.num_batches_tracked"]) == 12
    assert not torch.equal(state["0.running_mean"], torch.zeros(3))
    assert torch.equal(state["unused"], torch.ones(2))


def saves_into(held: nn.Module, store: CheckpointStore) -> Callable[[Running], AsyncCheckpointer]:
    def make(it: Running) -> AsyncCheckpointer:
        weight = held.get_parameter("weight").detach()
        return AsyncCheckpointer(
            store,
            lambda: ({"model/weight": weight}, {"dealer": it.ledger.allocator.state_dict()}),
            it.told.append,
            every=5,
        )

    return make


def test_a_checkpoint_is_there_also_when_no_further_step_comes(tmp_path):
    held = model()
    with running(held, checkpointer=saves_into(held, CheckpointStore(tmp_path))) as it:
        worker = model()
        there: list[events.CheckpointSaved] = []

        def waits_for_the_checkpoint(part: SampleRange) -> tuple[float, int]:
            if len(it.of(events.StepCommitted)) == 5:
                with contextlib.suppress(TimeoutError):  # the test says it, not a worker that goes away
                    wait_for(lambda: it.of(events.CheckpointSaved), seconds=10.0)
                there.extend(it.of(events.CheckpointSaved))
            return compute_on(worker)(part)

        it.work(0, worker, waits_for_the_checkpoint)
    it.checkpointer.close()
    assert [event.step for event in there] == [5]


def test_checkpoints_are_written_beside_training_and_at_the_end(tmp_path):
    held = model()
    store = CheckpointStore(tmp_path)
    with running(held, checkpointer=saves_into(held, store)) as it:
        worker = model()
        it.work(0, worker, compute_on(worker))
    it.checkpointer.close()
    saved = it.of(events.CheckpointSaved)
    assert saved[-1].step == 12
    newest = store.newest_good()
    assert newest is not None
    assert newest.state["dealer"]["missing"] == []
    assert torch.equal(newest.tensors()["model/weight"], held.get_parameter("weight").detach())


def test_stopping_finishes_what_is_assigned():
    held = model()
    with running(held) as it:
        worker = model()

        def compute(part: SampleRange) -> tuple[float, int]:
            if part.start == BATCH:
                send(it.control, {"type": "stop", "reason": "enough"})
            return compute_on(worker)(part)

        it.work(0, worker, compute)
    assert it.server.stopped == "enough"
    assert 2 <= it.ledger.version < 12
    assert not it.ledger.assigned
