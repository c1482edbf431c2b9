"""Threads that run a group's actions: in order by key, few of them, none lost when one cannot be started."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from paceline.comm.torch_process_group import background_threads
from paceline.comm.torch_process_group.background_threads import BackgroundThreads
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


def test_an_action_may_wait_for_one_of_its_own_key(threads: BackgroundThreads) -> None:
    order: list[str] = []
    queued, inner, ended = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        order.append("inner")
        inner.set()

    def first() -> None:
        assert queued.wait(10)
        assert threads.serves("key")
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
    assert not threads.serves("key")
