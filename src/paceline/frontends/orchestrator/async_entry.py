"""What runs in the processes of asynchronous SGD: the server's and the workers' side of one job.

Joins the training parts (model, objective, optimizer, data, checkpoints) to aggregate's server and worker.
The fork server imports this module once, before any of them. Must not know how the processes are started.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from paceline.aggregate.async_saving import Keeper
from paceline.aggregate.async_server import Server
from paceline.aggregate.async_sgd import Desk, Staleness
from paceline.aggregate.async_worker import Computed, work
from paceline.aggregate.dealing import Dealer, Range
from paceline.checkpoint.reading import Checkpoint
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.core.errors import ConfigError, ResourceError
from paceline.core.journal import Journal
from paceline.data.permutation import Permutation
from paceline.data.randomness import seed_everything
from paceline.data.sources import Source
from paceline.engines.local import call
from paceline.engines.local.child import Task
from paceline.frontends import tensor_payload
from paceline.train import optimizers, run_setup, state as model_state
from paceline.train.config import TrainConfig, definition
from paceline.train.feed import to_device
from paceline.train.objective import Objective
from paceline.train.own_process import OwnProcess
from paceline.train.run_folder import RunFolder
from paceline.train.state import state_hash

_log = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True)
class AsyncWork:
    """All of an asynchronous training, as it travels to its processes. `config` is resolved."""

    model: nn.Module | Callable[[], nn.Module]
    objective: Callable[..., Any]
    optimizer: Any
    config: TrainConfig
    batch: int
    train: Source
    folder: Path
    staleness: Staleness
    process: OwnProcess
    patience: float


def serve_main(task: Task) -> int:
    """Entry of the server's process; `options["resume"]` says whether it goes on from a checkpoint."""
    attempt, resume = task.options["attempt"], bool(task.options["resume"])
    assert isinstance(attempt, int)
    return _reported(task, lambda job, sock: _serve(job, sock, attempt, resume=resume))


def work_main(task: Task) -> int:
    """Entry of a worker's process; its second descriptor is the memory that it shares with the server."""
    slot = task.options["worker"]
    assert isinstance(slot, int)
    return _reported(task, lambda job, sock: _work(job, sock, task.descriptors[1], slot))


def _reported(task: Task, do: Callable[[AsyncWork, socket.socket], Any]) -> int:
    __tracebackhide__ = True
    packed = call.unpack(task.payload)
    task.shared = packed.classes
    job: AsyncWork = packed.args[0]
    try:
        job.process.settle()
        with socket.socket(fileno=task.descriptors[0]) as sock:
            result = do(job, sock)
        return call.pack_result(result, packed, task.rank, tensor_payload.reducers())
    except BaseException as error:
        task.fail(error)
        raise


def _serve(job: AsyncWork, control: socket.socket, attempt: int, *, resume: bool) -> dict[str, Any]:
    started = time.perf_counter()
    config, folder = job.config, RunFolder(job.folder)
    assert job.train.size is not None
    module = run_setup.build_model(job.model, config.seed).train()
    made = optimizers.build(job.optimizer, module)
    desk = Desk(Dealer(job.train.size, config.epochs or 1, job.batch), job.staleness, config.workers)
    with ExitStack() as stack:
        journal = Journal(folder.journal_file)
        stack.callback(journal.close)
        tell = _Notes(journal).append
        store = CheckpointStore(folder.checkpoint_url(config))
        keeper = Keeper(
            store,
            lambda: _contents(job, module, made, desk),
            tell,
            every=config.checkpoint.every_steps or 1 << 62,
            keep_last=config.checkpoint.keep_last,
        )
        stack.callback(keeper.close)
        found = store.newest_good() if resume else None
        if found is not None:
            _load(job, found, module, made, desk)
            keeper.goes_on_from(found.version, found.manifest.info.step, found.manifest.info.run)
        tell(events.SupervisorStarted(time=time.time(), pid=os.getpid(), attempt=attempt, address=""))
        tell(_beginning(job, found, desk))
        first_step = desk.version
        server = Server(
            module,
            made,
            desk,
            control,
            tell,
            keeper=keeper,
            workers=config.workers,
            clip_norm=config.clip_norm,
            patience=job.patience,
        )
        server.serve()
        digest = state_hash(module)
        reason = server.stopped if not desk.dealer.done else None
        tell(
            events.RunEnded(
                time=time.time(),
                step=desk.version,
                epoch=desk.dealer.completed,
                reason=reason or "finished",
                hash=digest,
            )
        )
        return {
            "hash": digest,
            "seconds": time.perf_counter() - started,
            "steps": [vars(step) for step in server.steps],
            "first_step": first_step,
            "epochs": desk.dealer.completed,
            "stopped": reason,
            "not_saved": None if keeper.failed is None else str(keeper.failed),
            "staleness": desk.statistics(),
            "weights": {n: t.detach().cpu() for n, t in model_state.model_tensors(module).items()},
        }


@final
class _Notes:
    """The journal, where a full disk delays what is written and stops nobody."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unwritten: deque[events.Event] = deque()

    def append(self, event: events.Event) -> None:
        self._unwritten.append(event)
        try:
            while self._unwritten:
                self._journal.append(self._unwritten[0])
                self._unwritten.popleft()
        except ResourceError as error:
            if len(self._unwritten) == 1:
                _log.error("%s; training goes on, and the journal is completed when that works again", error)


def _work(job: AsyncWork, sock: socket.socket, memory: int, slot: int) -> None:
    config = job.config
    with run_setup.prepared(config):
        device = run_setup.choose_device(config, slot)
        module = run_setup.build_model(job.model, config.seed).to(device).train()
        objective = Objective(job.objective)
        objective.to(device)
        orders: dict[int, Permutation] = {}

        def compute(part: Range) -> Computed:
            if part.epoch not in orders:
                orders.clear()
                assert job.train.size is not None
                orders[part.epoch] = Permutation(job.train.size, config.seed, part.epoch)
            ids = orders[part.epoch].take(part.start, part.stop)
            # By what is computed, not by who computes it.
            seed_everything(config.seed, part.epoch, part.start)
            batch = job.train.fetch(ids)
            if batch.count == 0:
                return Computed(0.0, 0)
            scored = objective.score(module, to_device(batch.data, device))
            scored.loss.backward()  # type: ignore[no-untyped-call]
            return Computed(float(scored.loss.detach()), batch.count)

        work(sock, memory, module, compute)
        objective.check_unchanged()
    os.close(memory)


def _contents(
    job: AsyncWork, module: nn.Module, made: list[Any], desk: Desk
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Laid out as the checkpoints of synchronous training, so that the same tools read them."""
    tensors = {model_state.MODEL + name: t for name, t in model_state.model_tensors(module).items()}
    tensors |= optimizers.tensors_of(made, module)
    tensors, pairs = model_state.as_pairs(tensors)
    plain = {
        "format": _FORMAT,
        "model": model_state.model_names(module),
        "optimizers": optimizers.plain_state_of(made, module),
        "definition": _definition(job),
        "dealer": desk.dealer.state_dict(),
        "version": desk.version,
        "pairs": pairs,
    }
    return tensors, plain


def _definition(job: AsyncWork) -> dict[str, Any]:
    return {**definition(job.config), "shards": None, "mode": "asynchronous"}


def _load(job: AsyncWork, found: Checkpoint, module: nn.Module, made: list[Any], desk: Desk) -> None:
    saved = found.state
    mine = {
        "mode": saved.get("definition", {}).get("mode"),
        "samples": saved.get("dealer", {}).get("samples"),
    }
    wanted = {"mode": "asynchronous", "samples": job.train.size}
    if mine != wanted:
        raise ConfigError(
            f"version {found.version} belongs to another run: {mine} instead of {wanted}",
            remedy="resume with the strategy and the data of the run, or choose another run_dir",
        )
    tensors = model_state.from_pairs(found.tensors(), saved["pairs"])
    model_state.load_model(module, tensors)
    optimizers.load(made, module, saved["optimizers"], tensors)
    desk.dealer.load_state_dict(saved["dealer"])
    desk.version = saved["version"]


def _beginning(job: AsyncWork, found: Checkpoint | None, desk: Desk) -> events.Event:
    if found is not None:
        return events.RunResumed(
            time=time.time(),
            version=found.version,
            step=desk.version,
            epoch=desk.dealer.completed,
            workers=job.config.workers,
        )
    return events.RunStarted(
        time=time.time(),
        workers=job.config.workers,
        shards=job.config.workers,
        samples=job.train.size,
        definition=_definition(job),
        fingerprint={},
    )
