"""Order of a group's collectives: those of the program, and those of callbacks of futures where the program
attached them.

A callback of a future that has a result runs at once, in the thread that attaches it, and its calls come
behind those that were issued by then. A callback of a future that has none yet runs later, while the program
issues other calls: its calls come in the same place, which is kept when it is attached. So the order is the
program's on every rank, whichever work ends first. Where no place could be kept, a call that others have
overtaken is refused."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, final

import torch

from paceline.comm.torch_process_group.background_threads import (
    BackgroundAction,
    BackgroundThreads,
    Place,
    in_background_thread,
    key_left_to_others,
)
from paceline.core.errors import DisagreementError

_COLLECTIVES = "collectives"
_moments = itertools.count(1)  # when calls were issued and callbacks attached, across the groups of a process
_of_this_thread = threading.local()  # `callback`: the one that runs; `nested`: how many in one another
_installing = threading.Lock()
_MOST_NESTED = 10  # callbacks in one another's calls, where each begins a call and attaches the next


@dataclass(eq=False, slots=True)
class _AttachedCallback:
    """A callback that was attached to a future without a result."""

    attached: int
    within: _AttachedCallback | None  # that attached it
    order: CallOrder | None = None  # in which it has a place
    place: Place | None = None

    def leave_place(self) -> None:
        if self.order is not None and self.place is not None:
            self.order.give_up(self.place)

    def forget_ended(self) -> None:
        """Drop the callbacks around this one that have ended: a chain of them may have no end."""
        while (outer := self.within) is not None and outer.place is not None and outer.place.closed:
            self.within = outer.within


class Issued(NamedTuple):
    """When a call was issued, in which order, and by which callback."""

    order: CallOrder
    moment: int
    by: _AttachedCallback | None


def _running() -> _AttachedCallback | None:
    return getattr(_of_this_thread, "callback", None)


@final
class CallOrder:
    """Order of the collectives of one group."""

    def __init__(self, threads: BackgroundThreads, rank: int) -> None:
        self._threads = threads
        self._rank = rank
        self._lock = threading.Lock()
        self._last = 0
        self._last_by: _AttachedCallback | None = None

    def begin_here(self) -> bool:
        """Return whether a call may run in the caller's thread at once: nothing is ahead of it."""
        with self._lock:
            if self._threads.is_busy(_COLLECTIVES) or _running() is not None:
                return False
            self._last, self._last_by = next(_moments), None
            return True

    def submit(self, action: BackgroundAction, what: str) -> Issued:
        """Run a call in the background when its turn has come, or here if it has."""
        callback = _running()
        with self._lock:
            self._check(callback, what)
            place = self._place_for(callback)
            moment = next(_moments)
            self._last, self._last_by = moment, callback
            if place is None:
                self._threads.submit(_COLLECTIVES, action)
        if place is not None:
            here = getattr(_of_this_thread, "nested", 0) < _MOST_NESTED
            if not (here and self._threads.run_here(_COLLECTIVES, action, place)):
                self._threads.submit(_COLLECTIVES, action, place)
        return Issued(self, moment, callback)

    def keep_place(self, callback: _AttachedCallback) -> None:
        """Keep the place of a callback behind the calls that were issued by now."""
        with self._lock:
            callback.place = self._threads.open_place(_COLLECTIVES, self._place_for(callback.within))
            callback.order = self
            self._last, self._last_by = next(_moments), callback.within

    def give_up(self, place: Place) -> None:
        self._threads.close_place(_COLLECTIVES, place)

    def _place_for(self, callback: _AttachedCallback | None) -> Place | None:
        """Return the place for the calls of a callback: its own, or that of the one that attached it."""
        while callback is not None:
            if callback.order is self and callback.place is not None and not callback.place.closed:
                return callback.place
            callback = callback.within
        return None

    def _check(self, callback: _AttachedCallback | None, what: str) -> None:
        """Refuse a callback's call where it would come behind calls that were issued after it was
        attached."""
        if callback is None or self._last_by is callback or self._last <= callback.attached:
            return
        if callback.order is not self or callback.place is None:
            why = "its future is not one of a collective of this group"
        elif callback.place.closed:
            why = "it has waited for one of them"
        else:
            return
        raise DisagreementError(
            "a callback calls a collective after others of its group were issued, and has no place among "
            f"them: {why}",
            calls={self._rank: what},
            remedy="call it outside of the callback, after waiting for the future",
        )


def wait_allowed(issued: Issued | None) -> None:
    """Let what comes behind the place of the callback that runs go ahead, if the callback waits for it."""
    callback = _running()
    if issued is None or callback is None:
        return
    callers, by = [], issued.by
    while by is not None:
        callers.append(by)
        by = by.within
    while callback is not None and callback not in callers:
        if callback.order is issued.order and issued.moment > callback.attached:
            callback.leave_place()
        callback = callback.within


# Which call a future is of. Weak: torch's futures have no room for it.
_issued: weakref.WeakKeyDictionary[Any, Issued] = weakref.WeakKeyDictionary()


def is_of(future: Any, issued: Issued | None) -> None:
    """Note which call a future is of, for the callbacks that are attached to it."""
    if issued is not None:
        _issued[future] = issued


def _attach(
    attach: Callable[[Any, Any], Any], future: Any, function: Callable[[Any], Any]
) -> tuple[Any, Issued | None]:
    """Attach a callback that keeps its place; return what torch does, and which call that is of."""
    issued = _issued.get(future)
    if future.done():
        nested = getattr(_of_this_thread, "nested", 0)
        _of_this_thread.nested = nested + 1
        try:
            return attach(future, function), issued
        finally:
            _of_this_thread.nested = nested
    callback = _AttachedCallback(next(_moments), _running())
    callback.forget_ended()
    if issued is not None:
        issued.order.keep_place(callback)

    def run(ended: Any) -> Any:
        if issued is None and not in_background_thread():
            return function(ended)  # in the program's own time
        before, _of_this_thread.callback = _running(), callback
        try:
            with key_left_to_others():
                return function(ended)
        finally:
            _of_this_thread.callback = before
            callback.leave_place()

    try:
        derived = attach(future, run)
    except BaseException:
        callback.leave_place()
        raise
    return derived, issued and Issued(issued.order, callback.attached, callback.within)


def then_at_once(future: Any, function: Callable[[Any], Any]) -> Any:
    """Return `future.then(function)` for a function that makes no calls."""
    then: Any = torch._C.Future.then
    return getattr(then, "__wrapped__", then)(future, function)


def install() -> None:
    """Make torch's futures keep the places of the callbacks that are attached to them, once a process."""
    kind: Any = torch._C.Future
    with _installing:
        if hasattr(kind.then, "__wrapped__"):
            return
        original_then, original_add, original_wait = kind.then, kind.add_done_callback, kind.wait
        original_collect: Any = torch._C._collect_all

        @wraps(original_then)
        def then(self: Any, callback: Callable[[Any], Any]) -> Any:
            derived, issued = _attach(original_then, self, callback)
            is_of(derived, issued)
            return derived

        @wraps(original_add)
        def add_done_callback(self: Any, callback: Callable[[Any], Any]) -> None:
            _attach(original_add, self, callback)

        @wraps(original_wait)
        def wait(self: Any) -> Any:
            if not self.done():
                wait_allowed(_issued.get(self))
            return original_wait(self)

        @wraps(original_collect)
        def collect_all(futures: Sequence[Any]) -> Any:
            collected = original_collect(futures)
            known = [_issued.get(future) for future in futures]
            calls = [issued for issued in known if issued is not None]
            # If it waits for something else as well, the group's calls must not wait for its callbacks.
            if len(calls) == len(known) and len({issued.order for issued in calls}) == 1:
                is_of(collected, max(calls, key=lambda issued: issued.moment))
            return collected

        kind.then, kind.add_done_callback, kind.wait = then, add_done_callback, wait
        torch._C._collect_all = collect_all
