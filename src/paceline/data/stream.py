"""Streams: samples that come in one order and have no numbers, read by one process and distributed.

A sample's number is its place in the epoch. The order, and what random code inside the dataset draws, depend
on (seed, epoch) alone: a stream has random generators that no other code draws from, so it does not
matter how many samples are taken at a time or what else the process does. Where reading stands is saved in
O(1) by a dataset with `state_dict` and `load_state_dict`; for any other, `load_state_dict` here reads the
samples up to that place again, and logs it.
"""

from __future__ import annotations

import base64
import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast, final

from torch.utils.data import default_collate

from paceline.core.errors import PacelineError, UsageError, WireError
from paceline.core.wording import counted
from paceline.data.read_errors import collated, name_of, read_error
from paceline.data.record_encoding import from_record, to_record
from paceline.data.seeding import Generators, one_thread, seed_everything, set_aside
from paceline.data.source_interface import Batch, Indices
from paceline.data.whole_numbers import whole

_log = logging.getLogger(__name__)

# Reading draws other numbers than work that happens to have the same seed and epoch.
_READING = 0x5354524541


@final
class Stream:
    """Samples of an iterable dataset, of a function that returns an iterator, or of any iterable.

    stream.start(epoch=0, seed=7); stream.take(64); stream.state_dict()
    """

    size: None = None

    def __init__(
        self, dataset: Any, *, collate: Callable[[Any], Any] | None = None, resumable: bool = True
    ) -> None:
        """Wrap `dataset`; with `resumable=False` do not trust its own state_dict."""
        self._dataset = dataset
        self.name = name_of(dataset)
        self._collate = collate or default_collate
        self._resumable = resumable
        self._one_shot = isinstance(dataset, Iterator)
        self._iterator: Iterator[Any] | None = None
        self._generators: Generators | None = None
        self._failure: PacelineError | None = None
        self._loaded: str | None = None
        self._as_given: tuple[Any] | None = None
        self._gave_samples = False
        self._seed = self.epoch = 0
        self.position = 0  # samples taken of this epoch: the number of the next one

    def reads_from(self, other: Stream) -> bool:
        """Return whether reading this one would move the other: one object with one place in it."""
        return self is other or (
            self._dataset is other._dataset and (self._one_shot or _has_state(self._dataset))
        )

    def start(self, epoch: int = 0, seed: int = 0) -> None:
        """Begin an epoch at its first sample."""
        self._begin(whole("epoch", epoch, 0), whole("seed", seed, 0), None)

    def take(self, count: int) -> list[Any]:
        """Return the next `count` samples; fewer at the end of the epoch, then none."""
        if self._iterator is None:
            self._begin(self.epoch, self._seed, None)
        if self._failure is not None:
            raise self._failure
        samples: list[Any] = []
        assert self._iterator is not None
        try:
            with self._own_randomness():
                samples.extend(islice(self._iterator, count))
        except PacelineError as error:
            self._failure = error
            raise
        except Exception as error:
            place = self.position + len(samples)
            self._failure = read_error(
                f"sample {place} of epoch {self.epoch} of {self.name} cannot be read",
                error,
                remedy="fix the dataset: what follows in the stream cannot be reached past an error",
                samples=(place,),
            )
            raise self._failure from error
        self.position += len(samples)
        self._loaded = None
        if samples:
            self._gave_samples = True
        elif count and not self.position and self._gave_samples:
            raise UsageError(
                f"{self.name} gave samples before and gives none in epoch {self.epoch}",
                remedy="let every iter() (or call) begin anew: return a new iterator each time",
            )
        return samples

    def batch(self, samples: list[Any]) -> Batch:
        """Collate samples that were taken."""
        if not samples:
            return Batch(None, 0)
        data = collated(self._collate, samples, lambda: f"{counted(len(samples), 'sample')} of {self.name}")
        return Batch(data, len(samples))

    def fetch(self, indices: Indices) -> Batch:
        """Return consecutive samples from `position` on; read and drop those before the first index."""
        if not len(indices):
            return Batch(None, 0)
        first = int(indices[0])
        if (indices[1:] - indices[:-1] != 1).any():
            raise UsageError(
                f"{self.name} is a stream: it gives samples one after the other, not {indices[:8].tolist()}",
                remedy="ask for consecutive numbers, or pass a dataset with __getitem__",
            )
        if first < self.position:
            raise UsageError(
                f"{self.name} is at sample {self.position} and cannot go back to {first}",
                remedy="start the epoch again: stream.start(epoch, seed)",
            )
        self._skip(first - self.position)
        return self.batch(self.take(len(indices)))

    def state_dict(self) -> dict[str, Any]:
        """Return where reading stands, as plain JSON data."""
        return {
            "epoch": self.epoch,
            "seed": self._seed,
            "position": self.position,
            "resume": self._saved_state(),
            "given": self._record(self._as_given[0]) if self._as_given and self._resumable else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved."""
        try:
            epoch = whole("epoch", state["epoch"], 0)
            seed = whole("seed", state["seed"], 0)
            position = whole("position", state["position"], 0)
            saved = state.get("resume")
            resume = None if saved is None else _plain(saved)
            self.begin_as(state)
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
            raise UsageError(
                f"this is not the state of a stream: {type(error).__name__}: {error}",
                remedy="pass what state_dict() of a stream returned",
            ) from error
        if resume is not None and self._resumable and self._stateful() is not None:
            self._begin(epoch, seed, resume)
            self.position, self._loaded = position, saved
            return
        self._begin(epoch, seed, None)
        if position:
            _log.warning(
                "%s cannot say where it stands (no state_dict that is exact): "
                "reading %s again to get to sample %d of epoch %d",
                self.name,
                counted(position, "sample"),
                position,
                epoch,
            )
        self._skip(position)

    def begin_as(self, state: dict[str, Any]) -> None:
        """Begin later passes as the stream that saved `state`: the one here may have been left halfway."""
        given = state.get("given")
        if given is not None and not self._one_shot and _has_state(self._dataset):
            self._as_given = (_plain(given),)

    def _skip(self, count: int) -> None:
        target = self.position + count
        while self.position < target:
            # In pieces, so that skipped samples are not all in memory at once.
            if not self.take(min(256, target - self.position)):
                raise UsageError(
                    f"{self.name} ended after {counted(self.position, 'sample')}, before sample {target}",
                    remedy="give the run the data that it was started with",
                )

    def _begin(self, epoch: int, seed: int, resume: Any) -> None:
        if self._one_shot and (self._gave_samples or self._failure is not None):
            raise UsageError(
                f"{self.name} is an iterator: it can be read once, and epoch {epoch} would be another pass",
                remedy="pass something that can begin again: a function that returns a new iterator, or an "
                "object whose __iter__ does",
            )
        self._iterator = self._failure = self._loaded = None
        self.epoch, self._seed, self.position = epoch, seed, 0
        with set_aside():
            seed_everything(seed, epoch, _READING)
            try:
                self._iterator = self._opened(epoch, resume)
                if resume is not None:
                    Generators.from_plain(resume["generators"]).enter()
            except PacelineError:
                raise
            except Exception as error:
                raise read_error(
                    f"{self.name} cannot be opened",
                    error,
                    remedy="a dataset's __iter__, or a function without arguments, must return an iterator",
                ) from error
            self._generators = Generators.current()

    def _opened(self, epoch: int, resume: Any) -> Iterator[Any]:
        dataset = self._dataset
        self._rewind()
        set_epoch = getattr(dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if resume is not None and resume["owner"] == "dataset":
            dataset.load_state_dict(resume["state"])
        iterator: Any = iter(dataset if isinstance(dataset, Iterable) or not callable(dataset) else dataset())
        if resume is not None and resume["owner"] == "iterator":
            iterator.load_state_dict(resume["state"])
        return cast("Iterator[Any]", iterator)

    def _rewind(self) -> None:
        """Begin every pass from the state in which the dataset was given, not where a pass left halfway, or a
        state that was loaded for another one, would have it begin."""
        if self._one_shot or not _has_state(self._dataset):
            return
        if self._as_given is None:
            self._as_given = (copy.deepcopy(self._dataset.state_dict()),)
        else:
            self._dataset.load_state_dict(copy.deepcopy(self._as_given[0]))

    def _stateful(self) -> tuple[str, Any] | None:
        candidates = (("iterator", self._iterator), ("dataset", self._dataset))
        return next((pair for pair in candidates if _has_state(pair[1])), None)

    def _saved_state(self) -> str | None:
        if self._loaded is not None:
            # Nothing was read since, and a generator that has not begun to run has raised nothing yet.
            return self._loaded
        stateful = self._stateful() if self._resumable and self.position and not self._failure else None
        if stateful is None or self._generators is None:
            return None
        generators = self._generators.to_plain()
        return self._record(
            {"owner": stateful[0], "state": stateful[1].state_dict(), "generators": generators}
        )

    def _record(self, state: Any) -> str | None:
        try:
            return base64.b64encode(to_record(state, "state")).decode()
        except UsageError as error:
            _log.warning(
                "the state_dict of %s cannot be saved, so resuming will read the samples before it again: %s",
                self.name,
                error.message,
            )
            self._resumable = False
            return None

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        outside = Generators.current()
        assert self._generators is not None
        self._generators.enter()
        try:
            with one_thread():
                yield
        finally:
            self._generators = Generators.current()
            outside.enter()


def _plain(record: str) -> Any:
    return from_record(bytearray(base64.b64decode(record, validate=True)))


def _has_state(candidate: Any) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in ("state_dict", "load_state_dict"))
