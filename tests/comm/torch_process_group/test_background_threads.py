"""Threads that run a group's actions: in order by key, few of them, none lost when one cannot be started."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from paceline.comm.torch_process_group import background_threads
from paceline.comm.torch_process_group.background_threads import BackgroundThreads, key_left_to_others
from paceline.core.errors import ResourceError


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> BackgroundThreads:
    monkeypatch.setattr(background_threads, "_LINGER_SECONDS", 0.01)  # so that a test leaves no thread
    return BackgroundThreads("tested")


def _tested() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tested"]


def test_actions_of_a_key_run_in_order_and_other_keys_beside_them(threads: BackgroundThreads) -> None:
    order: list[int] = []
    first, second = threading.Event(), threading.Event()
    threads.submit("slow", lambda: order.append(1) if first.wait(10) else None)
    for number in range(2, 50):
        threads.submit("slow", lambda number=number: order.append(number))  # type: ignore[misc]
    threads.submit("other", second.set)
    assert second.wait(10)
    assert threads.is_busy("slow")
    assert order == []
    first.set()
    assert threads.wait_idle(10)
    assert order == list(range(1, 50))
    assert not threads.is_busy("slow")


def test_keys_that_come_one_after_the_other_share_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_threads, "_LINGER_SECONDS", 1.0)
    threads = BackgroundThreads("tested")
    for number in range(200):
        threads.submit(("receive", number), lambda: None)
        assert threads.wait_idle(10)
    started = _tested()
    # A thread may still be on its way from the last action when the next key comes.
    assert len(started) < 10
    for thread in started:
        thread.join(10)


def test_a_thread_that_cannot_be_started_leaves_its_key_usable(
    threads: BackgroundThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_more:
        no_more.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ResourceError, match="no thread could be started") as caught:
            threads.submit("key", lambda: None)
        assert caught.value.remedy
    assert not threads.is_busy("key")
    ran = threading.Event()
    threads.submit("key", ran.set)
    assert ran.wait(10)
    assert threads.wait_idle(10)


def test_an_action_that_leaves_its_key_may_wait_for_one_of_it(threads: BackgroundThreads) -> None:
    order: list[str] = []
    queued, inner, ended = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        order.append("inner")
        inner.set()

    def first() -> None:
        assert queued.wait(10)
        with key_left_to_others():
            threads.submit("key", second)
            assert inner.wait(10)
        order.append("outer")
        ended.set()

    threads.submit("key", first)
    threads.submit("key", lambda: order.append("behind"))
    queued.set()
    assert ended.wait(10)
    assert threads.wait_idle(10)
    assert order == ["behind", "inner", "outer"]


def test_what_is_submitted_to_a_place_runs_there_and_the_rest_waits_for_its_end(
    threads: BackgroundThreads,
) -> None:
    order: list[str] = []
    inside, last = threading.Event(), threading.Event()

    def inner_call() -> None:
        order.append("in inner")
        inside.set()

    def last_call() -> None:
        order.append("behind")
        last.set()

    threads.submit("key", lambda: order.append("before"))
    outer = threads.open_place("key")
    threads.submit("key", last_call)
    inner = threads.open_place("key", outer)
    threads.submit("key", lambda: order.append("after inner"), outer)
    threads.close_place("key", outer)
    threads.submit("key", inner_call, inner)
    assert inside.wait(10)
    assert threads.is_busy("key")
    assert not last.is_set()
    threads.close_place("key", inner)
    threads.close_place("key", inner)
    assert last.wait(10)
    assert threads.wait_idle(10)
    assert order == ["before", "in inner", "after inner", "behind"]


def test_a_call_whose_turn_it_is_runs_in_the_thread_that_makes_it(threads: BackgroundThreads) -> None:
    ran: list[int] = []
    place = threads.open_place("key")
    later = threads.open_place("key")
    assert not threads.run_here("key", lambda: ran.append(0), later)
    assert threads.run_here("key", lambda: ran.append(threading.get_ident()), place)
    assert ran == [threading.get_ident()]
    threads.close_place("key", place)
    threads.close_place("key", later)
    assert threads.wait_idle(0)


def test_a_chain_of_places_has_no_depth(threads: BackgroundThreads) -> None:
    place, ran = threads.open_place("key"), threading.Event()
    for _ in range(3000):
        following = threads.open_place("key", place)
        threads.close_place("key", place)
        place = following
    threads.submit("key", ran.set, place)
    assert ran.wait(10)
    threads.close_place("key", place)
    assert threads.wait_idle(10)


def test_without_another_thread_an_action_keeps_its_key(
    threads: BackgroundThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, order = threading.Event(), list[int]()

    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    def first() -> None:
        assert queued.wait(10)
        with monkeypatch.context() as no_more:
            no_more.setattr(threading.Thread, "start", refuse)
            with key_left_to_others():
                order.append(1)

    threads.submit("key", first)
    threads.submit("key", lambda: order.append(2))
    queued.set()
    assert threads.wait_idle(10)
    assert order == [1, 2]
