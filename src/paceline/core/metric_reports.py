"""Numbers that the user's code reports from anywhere in a rank: `paceline.metrics.report`.

A report goes to the sinks of this process and to the journal of the run that the rank is in, and from there
to the run's trackers and to the sinks of the process that called `fit`. A sink that raises is said once, and
stops nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

from paceline.core import log
from paceline.core.errors import UsageError
from paceline.core.events import MetricReported
from paceline.core.wording import with_article

_log = logging.getLogger(__name__)

Sink = Callable[[str, float, dict[str, str]], object]
"""Called with the name, the value and the tags of a report."""

_TakeMetric = Callable[[MetricReported], None]

_lock = threading.Lock()
_sinks: list[Sink] = []
_broken: set[int] = set()  # sinks that have raised, by id: said once
_journals: dict[int, _TakeMetric] = {}  # by rank: ranks may be threads of one process


def report(name: str, value: SupportsFloat, tags: Mapping[str, object] | None = None) -> None:
    """Report a number: to the journal of the run that this rank is in, its trackers and the sinks.

    value   a number, also a tensor or an array with one element (on a GPU that waits for the device)
    tags    what tells reports of one name apart: {"split": "test"}
    """
    position = log.position()
    number, words = _number(name, value), _tags(name, tags)
    metric = MetricReported(
        time=time.time(),
        name=name,
        value=number,
        rank=position.rank or 0,
        step=position.step or 0,
        tags=words,
    )
    tell = _journals.get(metric.rank)
    if tell is None and len(_journals) == 1:
        tell = next(iter(_journals.values()))
    if tell is not None:
        tell(metric)
    pass_to_sinks(metric)


def add_sink(sink: Sink) -> Sink:
    """Call `sink(name, value, tags)` for every report of this process, and of the workers of a run that it
    has started under a supervisor. Return the sink, so that @add_sink can stand above a function."""
    if not callable(sink):
        raise UsageError(
            f"add_sink was given {with_article(sink)}", remedy="give a function of name, value, tags"
        )
    with _lock:
        _sinks.append(sink)
    return sink


def remove_sink(sink: Sink) -> None:
    """Call this sink no longer."""
    with _lock:
        if sink not in _sinks:
            raise UsageError(
                "remove_sink was given a sink that was not added", remedy="give what add_sink got"
            )
        _sinks.remove(sink)
        _broken.discard(id(sink))


def pass_to_sinks(metric: MetricReported) -> None:
    """Call the sinks of this process with a report."""
    for sink in tuple(_sinks):
        try:
            sink(metric.name, metric.value, dict(metric.tags))
        except Exception as error:
            if id(sink) not in _broken:
                _broken.add(id(sink))
                _log.warning("the metrics sink %r raised, which is said once: %r", sink, error)


@contextmanager
def journal_of(rank: int, tell: _TakeMetric) -> Iterator[None]:
    """Send the reports of a rank of this process to its run, inside the block."""
    before = _journals.get(rank)
    _journals[rank] = tell
    try:
        yield
    finally:
        if before is None:
            _journals.pop(rank, None)
        else:
            _journals[rank] = before


def _number(name: object, value: SupportsFloat) -> float:
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"a metric's name is text, given {name!r}", remedy='report("accuracy", 0.9)')
    try:
        if isinstance(value, str):
            raise TypeError("text")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(
            f"the metric {name!r} was reported as {with_article(value)}, which is not one number",
            remedy="report each number under another name",
        ) from error


def _tags(name: str, tags: Mapping[str, object] | None) -> dict[str, str]:
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise UsageError(
            f"the tags of the metric {name!r} are {with_article(tags)}",
            remedy='give a dict: {"split": "test"}',
        )
    return {str(key): str(value) for key, value in tags.items()}
