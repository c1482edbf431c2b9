"""Requests in, batches out, in order: in this process, or through the workers that a DataLoader asked for.

The randomness of reading is seeded by the request before it is read, by whoever reads it, so an augmentation
draws the same numbers with any number of workers; the generators of the calling process are left alone. Must
not know which samples are asked for, nor why.
"""

from __future__ import annotations

import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from paceline.core.errors import PacelineError, PlatformError
from paceline.data import shared_memory
from paceline.data.arrays import ArraySource
from paceline.data.batches import Batch, Request, Source, can_pin
from paceline.data.generators import new_numpy, one_thread, set_aside
from paceline.data.mapped import Loading, MapSource
from paceline.data.naming import given_name
from paceline.data.randomness import seed_everything
from paceline.data.read_errors import read_error

_GRACE_SECONDS = 0.2
# How torch's messages about workers that died or are late begin; anything else comes from the requests.
_LOADERS_OWN = ("DataLoader", "Pin memory")


def read(source: Source, requests: Iterable[Request], *, here: bool = False) -> Generator[Batch, None, None]:
    """One batch per request, in order. Closing the generator ends its workers. `here`: in this process,
    whatever the DataLoader asked for: for few requests that nobody could know of ahead."""
    if isinstance(source, ArraySource):
        return _read_arrays(source, requests, source.pin_memory and can_pin())
    loading = source.loading if isinstance(source, MapSource) else Loading()
    if loading.workers and not here:
        return _read_by_workers(source, requests, loading)
    return _read_here(source, requests, loading.pin_memory and can_pin())


def _read_arrays(source: ArraySource, requests: Iterable[Request], pin: bool) -> Generator[Batch, None, None]:
    for request in requests:
        # Nothing of the user's runs, so there is no randomness to seed.
        batch = source.fetch(request.indices)
        yield batch.pin_memory() if pin else batch


def _read_here(source: Source, requests: Iterable[Request], pin: bool) -> Generator[Batch, None, None]:
    numpy = new_numpy()
    for request in requests:
        with set_aside(numpy), one_thread():
            seed_everything(*request.key)
            batch = source.fetch(request.indices)
        yield batch.pin_memory() if pin else batch


def _read_by_workers(
    source: Source, requests: Iterable[Request], loading: Loading
) -> Generator[Batch, None, None]:
    with warnings.catch_warnings():
        # Whoever made the DataLoader has been told already that there are more workers than cores.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        batches = _started(source, requests, loading)
    try:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith(_LOADERS_OWN):
                    raise
                raise _lost(source, loading, error) from error
            if isinstance(batch, _Failure):
                raise batch.error
            yield batch
    finally:
        _end(batches)


def _started(source: Source, requests: Iterable[Request], loading: Loading) -> Any:
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
    return iter(loader)


def _end(batches: Any) -> None:
    # torch waits five seconds for a worker that is inside a slow sample, which nobody wants any more. Before
    # it is killed torch is told not to watch it any longer: its end is no failure.
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


def _lost(source: Source, loading: Loading, error: RuntimeError) -> PacelineError:
    trouble = shared_memory.full(error)
    if trouble is not None:
        return trouble
    return PlatformError(
        f"a worker process of the loader of {given_name(source)} failed: {error}",
        remedy=f"look for a lack of memory; use fewer than num_workers={loading.workers} or a smaller "
        "prefetch_factor, or num_workers=0 to read in the calling process",
    )


@final
@dataclass(frozen=True)
class _Failure:
    """What reading raised, as a value: torch's loader would rebuild the error from its text alone."""

    error: PacelineError


@final
class _Requested(Dataset[Any]):
    """A source as the loader's workers see it: an item is a whole request."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: Request) -> Batch | _Failure:
        try:
            seed_everything(*request.key)
            batch = self._source.fetch(request.indices)
            shared_memory.shared(batch.data)
            return batch
        except PacelineError as error:
            error.add_note("in a worker process of the loader:\n" + traceback.format_exc().rstrip())
            return _Failure(error)
        except Exception as error:
            name = given_name(self._source)
            fix = f"fix what {name} does when samples are read"
            full = shared_memory.full(error)
            wrapped: PacelineError = full or read_error(f"{name} could not read samples", error, remedy=fix)
            wrapped.__cause__ = error
            wrapped.add_note("in a worker process of the loader:\n" + traceback.format_exc().rstrip())
            return _Failure(wrapped)


def _as_it_is(item: Any) -> Any:
    return item
