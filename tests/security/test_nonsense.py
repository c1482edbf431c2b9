"""A peer with the token that sends nonsense is dropped; the supervisor and the workers go on."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.elastic.supervised_jobs import Run, drop, running
from tests.security.hostile_peer import facts, hello_as, hostile, in_place_of
from tests.waiting import wait_for

from paceline.control import messages
from paceline.control.channel import MAX_FRAME
from paceline.control.messages import (
    CollectiveFailed,
    ControlMessage,
    Heartbeat,
    JournalLines,
    MemberReport,
    StepReceipt,
    ToolRequest,
    ViewInstalled,
    WorkerExited,
)
from paceline.core.events import Note, SupervisorStarted, WorkerFailed
from paceline.core.version import PROTOCOL, VERSION

STEP = '{{"type":"step_committed","time":1.0,"step":{}}}'

NONSENSE: dict[str, ControlMessage | list[Any] | bytes] = {
    "a step that is text": JournalLines(generation=1, lines=(STEP.format('"x"'),)),
    "a step that is a list": JournalLines(generation=1, lines=(STEP.format("[[]]"),)),
    "a step far ahead": JournalLines(generation=1, lines=(STEP.format(10**15),)),
    "a negative step": JournalLines(generation=1, lines=(STEP.format(-5),)),
    "a step with 4000 digits": JournalLines(generation=1, lines=(STEP.format("9" * 4000),)),
    "no step": JournalLines(generation=1, lines=('{"type":"step_committed","time":1.0}',)),
    "resumed at text": JournalLines(generation=1, lines=('{"type":"run_resumed","time":1.0,"step":"x"}',)),
    "no time": JournalLines(generation=1, lines=('{"type":"note","time":NaN,"text":"x"}',)),
    "half a character": JournalLines(generation=1, lines=('{"type":"note","time":1.0,"text":"\ud800"}',)),
    "two lines in one": JournalLines(
        generation=1, lines=('{"type":"note","time":1.0}\n{"type":"note","time":1.0}',)
    ),
    "a hash of no step": StepReceipt(generation=1, first=1, last=0, shards=(), hashes={"abc": "x"}),
    "a hash of another alphabet": StepReceipt(
        generation=1, first=1, last=0, shards=(), hashes={"\u0663": "x"}
    ),
    "receipts for ever": StepReceipt(generation=1, first=1, last=1 << 47, shards=(0,)),
    "a number of no message": [1 << 60, "Heartbeat", {"phase": "forward", "seconds": 1.0}],
    "a bool for a number": [0, "ViewInstalled", {"generation": True}],
    "NaN seconds": [0, "Heartbeat", {"phase": "forward", "seconds": float("nan")}],
    "infinite seconds": [0, "Heartbeat", {"phase": "forward", "seconds": 1.0, "shard_seconds": float("inf")}],
    "seconds beyond all clocks": Heartbeat(phase="forward", seconds=1.0, shard_seconds=1e308),
    "negative seconds": Heartbeat(phase="forward", seconds=1.0, step_seconds=-1e9),
    "negative progress": Heartbeat(phase="forward", seconds=1.0, progress=(-1, 0, 0)),
    "progress beyond all": Heartbeat(phase="forward", seconds=1.0, progress=(1 << 60, 0, 0)),
    "a phase of a megabyte": Heartbeat(phase="x" * (1 << 20), seconds=1.0),
    "a generation beyond all": MemberReport(generation=1 << 62, progress=None),
    "a negative generation": ViewInstalled(generation=-1),
    "a supervisor's message": [0, "Ack", {"number": 1}],
    "an agent's message": WorkerExited(member=1, status=0, reason="made up"),
    "bytes": b"\xc1\xff\x00nonsense",
    "deep": b"\x91" * 100_000,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("job")
    budget = {
        "max_worker_failures": 10**6,
        "max_preemptions": 10**6,
        "hang_least": 60.0,
        "silence_least": 60.0,
    }
    with running(folder, workers=2, steps=10**9, machine=budget, step_seconds=0.02) as run:
        run.until_step(2)
        yield run
        run.until_step(run.steps[-1] + 3)
        assert len(run.of(SupervisorStarted)) == 1
        run.supervised.stop("the test is over")
        assert drop(run.finish(120.0)).stopped == "the test is over"
    assert run.steps == list(range(1, len(run.steps) + 1))


@pytest.mark.parametrize("what", NONSENSE)
def test_a_worker_that_sends_nonsense_is_dropped(job, what):
    supervisor, before = job.supervised.pid, facts(job)
    with in_place_of(job, before["workers"][0]) as peer:
        peer.send(NONSENSE[what])
        assert peer.is_dropped()
    # The worker whose place it took comes back by itself, and training goes on.
    job.until_step(job.steps[-1] + 3)
    after = facts(job)
    assert (after["attempt"], job.supervised.pid) == (1, supervisor)
    assert [one["pid"] for one in after["workers"]] == [one["pid"] for one in before["workers"]]
    assert not job.of(WorkerFailed)
    assert after["dropped"] == before["dropped"] + 1
    assert "was dropped" in job.of(Note)[-1].text


def test_an_agent_cannot_speak_for_workers_of_another_machine(job):
    member = facts(job)["workers"][0]["member"]
    with hostile(job) as peer:
        peer.send(
            messages.AgentHello(workers=1, host="evil", hostname="evil", pid=1),
            WorkerExited(member=member, status=-9, reason="made up"),
            messages.AgentHello(workers=0, host="evil", hostname="evil", pid=1),
        )
        job.until_step(job.steps[-1] + 3)
    assert not [one for one in job.of(WorkerFailed) if one.reason == "made up"]


def test_sizes_that_no_job_can_have_are_refused(job):
    before = facts(job)
    for number in (1 << 30, -5, 10**6):
        with hostile(job) as peer:
            peer.send(ToolRequest(what="scale", number=number))
            assert b"workers are" in peer.sock.recv(4096)
    with hostile(job) as peer:
        fields = {"workers": 10**9, "host": "h", "hostname": "h", "pid": 1}
        peer.send([0, "Offer", {**fields, "protocol": PROTOCOL, "version": VERSION}])
        assert peer.is_dropped()
    after = facts(job)
    assert (after["attempt"], after["dropped"]) == (before["attempt"], before["dropped"] + 1)


# Of each kind of value: some that a run has, some that none has, and some of other types.
NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**48, 2**53, 2**63 - 1, -(2**63), 10**6]),
    st.booleans(),
    st.none(),
    st.floats(),
    st.text(max_size=3),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["x" * 100_000, "\x1b[2J", "\ud800", "0", "٣", "collective", STEP.format('"x"')]),
    st.integers(-1, 1),
    st.none(),
)
FLOATS = st.one_of(st.floats(), st.integers(-1, 2**60), st.text(max_size=2))
ANYTHING = st.recursive(st.one_of(NUMBERS, TEXTS), lambda inner: st.lists(inner, max_size=3), max_leaves=5)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values for a field: mostly of its type, hostile or not."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return FLOATS
    if hint is int:
        return NUMBERS
    if hint is str:
        return TEXTS
    if hint is bool:
        return st.one_of(st.booleans(), NUMBERS)
    if origin is tuple:
        inner = [values(arg) for arg in args if arg is not ...]
        if args[-1] is ...:
            return st.one_of(st.lists(inner[0], max_size=4), ANYTHING)
        return st.one_of(st.tuples(*inner).map(list), ANYTHING)
    if origin is dict:
        return st.one_of(st.dictionaries(TEXTS.filter(hashable), values(args[1]), max_size=3), ANYTHING)
    if type(None) in args:
        return st.one_of(st.none(), *(values(arg) for arg in args if arg is not type(None)))
    return ANYTHING


def hashable(value: Any) -> bool:
    return not isinstance(value, list)


def plain_messages(kinds: list[str]) -> st.SearchStrategy[list[Any]]:
    def fields(kind: str) -> st.SearchStrategy[list[Any]]:
        cls = messages.REGISTRY[kind]
        hints = typing.get_type_hints(cls)
        given = {field.name: values(hints[field.name]) for field in dataclasses.fields(cls)}
        return st.tuples(st.one_of(st.just(0), NUMBERS), st.just(kind), st.fixed_dictionaries(given)).map(
            list
        )

    return st.sampled_from(kinds).flatmap(fields)


# What may end a job, or a worker, when its values happen to be right: it is a worker's to say.
MAY_END = {"WorkerException", "MemberFinished", "LeaveRequest", "Ask", "Offer"}
KINDS = sorted(set(messages.REGISTRY) - MAY_END)


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(plain_messages(KINDS), min_size=1, max_size=4), st.booleans())
def test_no_message_of_a_proven_peer_ends_the_supervisor(job, said, seated):
    supervisor = job.supervised.pid
    workers = facts(job)["workers"]
    with hostile(job) as peer:
        first = [hello_as(workers[0])] if seated and workers else []
        try:
            peer.send(*first, *said)
        except OverflowError:
            return  # more than 64 bits: no encoder makes it
    assert facts(job)["attempt"] == 1
    os.kill(supervisor, 0)
    job.supervised.wait(0.0)
    assert job.supervised.pid == supervisor


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(plain_messages(sorted(MAY_END - {"Ask"})), min_size=1, max_size=3))
def test_no_wrong_value_of_what_may_end_a_worker_ends_the_supervisor(job, said):
    """As a guest: out of a worker's seat, they would be believed where they are right."""
    with hostile(job) as peer:
        try:
            peer.send(*said)
        except OverflowError:
            return
    assert facts(job)["attempt"] == 1


def test_a_reason_of_megabytes_is_cut(job):
    """What a member gives as a reason goes into messages to all others, which have a longest length."""
    before = facts(job)
    with in_place_of(job, before["workers"][0], before["generation"]) as peer:
        peer.send(CollectiveFailed(generation=before["generation"], reason="x" * (MAX_FRAME - 80)))
        # The view is made anew: some time later it is another one.
        wait_for(lambda: facts(job)["generation"] > before["generation"])
    job.until_step(job.steps[-1] + 3)
    after = facts(job)
    assert (after["attempt"], after["dropped"]) == (1, before["dropped"])
