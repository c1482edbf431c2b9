"""Requests in, batches out, in order: in this process, or through the workers that a DataLoader asked for.

The randomness of reading is seeded by the request before it is read, in the reading process, so an
augmentation draws the same numbers with any number of workers; the generators of the calling process are left
alone.
"""

from __future__ import annotations

import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from paceline.core.errors import PacelineError, PlatformError
from paceline.data.arrays import ArraySource
from paceline.data.map_source import Loading, MapSource
from paceline.data.orders import OrderedSource
from paceline.data.read_errors import assigned_name, read_error, shared_memory_full
from paceline.data.seeding import one_thread, seed_everything, set_aside
from paceline.data.source_interface import Batch, Request, Source, can_pin

_GRACE_SECONDS = 0.2
# How torch's messages about workers that died or are late begin; anything else comes from the requests.
_LOADERS_OWN = ("DataLoader", "Pin memory")


def read(source: Source, requests: Iterable[Request], *, here: bool = False) -> Generator[Batch, None, None]:
    """Return one batch per request, in order. Closing the generator ends its workers. `here`: in this
    process, whatever the DataLoader asked for: for few requests that were not known ahead."""
    if isinstance(source, OrderedSource):
        source = source.source  # a request has the numbers of the samples themselves
    if isinstance(source, ArraySource):
        # Nothing of the user's runs, so there is no randomness to seed.
        batches = (source.fetch(request.indices) for request in requests)
        return (batch.pin_memory() for batch in batches) if source.pin_memory and can_pin() else batches
    loading = source.loading if isinstance(source, MapSource) else Loading()
    if loading.workers and not here:
        return _read_by_workers(source, requests, loading)
    return _read_here(source, requests, loading.pin_memory and can_pin())


def _read_here(source: Source, requests: Iterable[Request], pin: bool) -> Generator[Batch, None, None]:
    numpy = np.random.MT19937(0)
    for request in requests:
        with set_aside(numpy), one_thread():
            seed_everything(*request.key)
            batch = source.fetch(request.indices)
        yield batch.pin_memory() if pin else batch


def _read_by_workers(
    source: Source, requests: Iterable[Request], loading: Loading
) -> Generator[Batch, None, None]:
    with warnings.catch_warnings():
        # The DataLoader has warned its maker already that there are more workers than cores.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            _Requested(source),
            batch_size=None,
            sampler=requests,
            collate_fn=_as_it_is,
            num_workers=loading.workers,
            prefetch_factor=loading.prefetch,
            pin_memory=loading.pin_memory and can_pin(),
            timeout=loading.timeout,
            worker_init_fn=partial(_begin_worker, loading.worker_init),
            multiprocessing_context=loading.context,
            # The loader draws a number when it starts: not from the generator of the calling process.
            generator=torch.Generator(),
        )
        batches = iter(loader)
    try:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith(_LOADERS_OWN):
                    raise
                raise shared_memory_full(error) or PlatformError(
                    f"a worker process of the loader of {assigned_name(source)} failed: {error}",
                    remedy=f"look for a lack of memory; use fewer than num_workers={loading.workers} or a "
                    "smaller prefetch_factor, or num_workers=0 to read in the calling process",
                ) from error
            # An error comes as a value: torch's loader would rebuild a raised one from its text alone.
            if isinstance(batch, PacelineError):
                raise batch
            yield batch
    finally:
        _end(batches)


def _end(batches: Any) -> None:
    # torch waits five seconds for a worker that is inside a slow sample, which is not needed. Before
    # it is killed, torch's watch of it ends: its end is no failure.
    if batches._worker_pids_set:
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    stop = threading.Timer(_GRACE_SECONDS, lambda: [worker.kill() for worker in batches._workers])
    stop.start()
    try:
        batches._shutdown_workers()
    finally:
        stop.cancel()
        stop.join()


def _begin_worker(worker_init: Callable[[int], None] | None, number: int) -> None:
    # A signal to every process of a job asks the run to stop after its step, for which it needs this worker.
    for asking in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(asking, signal.SIG_IGN)
    if worker_init is not None:
        worker_init(number)


@final
class _Requested(Dataset[Any]):
    """A source as the loader's workers see it: an item is a whole request."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: Request) -> Batch | PacelineError:
        try:
            seed_everything(*request.key)
            batch = self._source.fetch(request.indices)
            _share(batch.data)
            return batch
        except Exception as error:
            failure = self._failure(error)
            failure.add_note("in a worker process of the loader:\n" + traceback.format_exc().rstrip())
            return failure

    def _failure(self, error: Exception) -> PacelineError:
        if isinstance(error, PacelineError):
            return error
        name = assigned_name(self._source)
        fix = f"fix what {name} does when samples are read"
        failure = shared_memory_full(error) or read_error(f"{name} could not read samples", error, remedy=fix)
        failure.__cause__ = error
        return failure


def _share(data: Any) -> None:
    """Move the tensors of a batch to shared memory now, where an error reaches the reader: later, on their
    way, torch drops the batch, and the reader waits for ever."""
    if isinstance(data, Tensor):
        if data.device.type == "cpu" and data.layout is torch.strided and not data.is_shared():  # type: ignore[no-untyped-call]
            data.share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(data, dict | list | tuple):
        for value in data.values() if isinstance(data, dict) else data:
            _share(value)


def _as_it_is(item: Any) -> Any:
    return item
