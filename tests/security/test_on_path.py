"""A machine on the path between `paceline join` and the supervisor: it passes the proof on, then speaks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.elastic.supervised_jobs import Run, drop, running
from tests.security.certificates import Authority
from tests.security.evil_entry import ENTRY
from tests.security.relay import DOWN, UP, Direction, Passed, Relay
from tests.waiting import wait_for

from paceline.control import channel
from paceline.control.messages import (
    AgentAccepted,
    AgentEnd,
    AgentHello,
    AgentStart,
    ControlMessage,
    Dismissed,
    JournalLines,
    MemberFinished,
    PayloadChunk,
    Stop,
    ToolRequest,
    WorkerException,
)
from paceline.core.events import ViewChanged, WorkerFailed
from paceline.core.session_auth import TAG_BYTES
from paceline.core.tls import Tls
from paceline.engines.local import launch, memfd_pickle

ROOT = Path(__file__).parents[2]
FORGED = bytes(TAG_BYTES)


class Joiner:
    """`paceline join` in a process of its own, and what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def said(self) -> str:
        return self._output.read_text()


@contextlib.contextmanager
def joining(folder: Path, run: Run, address: str, tls: Tls | None = None) -> Iterator[Joiner]:
    output = folder / "join.log"
    command = [sys.executable, "-m", "paceline", "join", address, "--workers", "1"]
    command += ["--token-file", str(run.folder / "control.secret")]
    if tls is not None:
        command += ["--certificate", str(tls.certificate), "--key", str(tls.key)]
        command += ["--authority", str(tls.authority)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PACELINE_HOST": "far"}
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield Joiner(process, output)
    finally:
        process.terminate()
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def job(folder: Path, tls: Tls | None = None) -> Iterator[Run]:
    """A job that trains, and must not notice anything of what a test does."""
    with running(folder, workers=2, steps=10**6, tls=tls, shared=str(folder)) as run:
        run.until_step(3)
        first = dict(run.pids())
        yield run
        now = run.steps[-1]
        run.until_step(now + 5)
        assert {rank: run.pids()[rank] for rank in (0, 1)} == first
        assert not [one for one in run.of(WorkerFailed) if one.rank in (0, 1)]
        run.supervised.stop("the test is over")
        assert drop(run.finish()).stopped == "the test is over"


def forged(message: ControlMessage) -> bytes:
    """A frame as an attacker can make it: no key, so no tag."""
    return channel.frame(message) + FORGED


def kind_of(frame: bytes) -> str:
    body: Any = msgpack.unpackb(frame[4 : len(frame) - TAG_BYTES])
    return str(body[1])


def attack_with_code(mark: Path) -> bytes:
    """What makes a joiner run code: a grant with options, the payload, an order to start."""
    packed = memfd_pickle.dump(str(mark))
    data = os.pread(packed, 1 << 20, 0)
    os.close(packed)
    order = launch.order_from_caller(ENTRY, 1, (), 1, {})
    granted = AgentAccepted(
        agent=1,
        payload_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
        options={"options": {}, "entry": order.entry, "preload": [], "threads": 1},
    )
    piece, start = PayloadChunk(offset=0, data=data), AgentStart(member=77, slot=0)
    return b"".join(map(forged, (granted, piece, start)))


def test_code_of_a_relay_is_not_run_by_the_joiner(tmp_path):
    mark = tmp_path / "mark"
    code = attack_with_code(mark)

    def attack(passed: Passed, direction: Direction, number: int, frame: bytes) -> bytes | None:
        if direction == DOWN and number == 0:
            passed.inject(DOWN, code)
        return b"" if direction == DOWN else None

    with job(tmp_path / "run") as run, Relay(run.supervised.address, attack) as relay:
        with joining(tmp_path, run, relay.address_text) as joiner:
            wait_for(lambda: "tag of this session" in joiner.said or mark.exists())
            # The next connections fare no better.
            wait_for(lambda: len([one for one in relay.passed if one.ended]) >= 2 or mark.exists())
        assert not mark.exists()
    assert relay.passed[0].ended == DOWN


@pytest.mark.parametrize(
    "message",
    [
        ToolRequest(what="status"),
        ToolRequest(what="stop", text="stopped by the attacker"),
        ToolRequest(what="scale", number=1),
        AgentHello(workers=4, host="evil", hostname="evil", pid=1),
    ],
    ids=lambda message: f"{message.kind} {getattr(message, 'what', '')}",
)
def test_a_relay_cannot_speak_to_the_supervisor(tmp_path, message):
    def attack(passed: Passed, direction: Direction, number: int, frame: bytes) -> bytes | None:
        if direction == UP and number == 0:
            passed.attacked = True
            return forged(message)
        return b""

    with (
        job(tmp_path / "run") as run,
        Relay(run.supervised.address, attack) as relay,
        joining(tmp_path, run, relay.address_text),
    ):
        wait_for(lambda: relay.passed and relay.passed[0].ended)
    # The connection was closed without an answer, a grant or a byte of the payload.
    assert relay.passed[0].ended == UP
    assert not relay.passed[0].back[DOWN]
    assert len(run.of(ViewChanged)) == 1


def flip(frame: bytes) -> bytes:
    return frame[:9] + bytes([frame[9] ^ 1]) + frame[10:]


TAMPERING: dict[str, Callable[[bytes], bytes]] = {
    "changed": flip,
    "cut short": lambda frame: frame[:4] + frame[5:],
    "dropped": lambda frame: b"",
    "repeated": lambda frame: frame + frame,
    "another tag": lambda frame: frame[:-TAG_BYTES] + FORGED,
}


@pytest.mark.parametrize("direction", [UP, DOWN])
@pytest.mark.parametrize("what", TAMPERING)
def test_tampered_frames_of_a_joiner_are_refused_and_it_joins_again(tmp_path, what, direction):
    def attack(passed: Passed, towards: Direction, number: int, frame: bytes) -> bytes | None:
        # The first Start of the supervisor is the second or a later frame; a joiner says Offer, then Exited.
        if passed.number > 1 or towards != direction or passed.attacked:
            return None
        passed.attacked = True
        if what == "dropped" and direction == UP:
            # It has said all that it says: what comes next is made up.
            return forged(AgentHello(workers=9, host="evil", hostname="evil", pid=1))
        return TAMPERING[what](frame)

    with job(tmp_path / "run") as run, Relay(run.supervised.address, attack) as relay:
        with joining(tmp_path, run, relay.address_text) as joiner:
            run.until(lambda: "far" in run.of(ViewChanged)[-1].hosts, 90.0)
        if direction == DOWN:
            assert "tag of this session" in joiner.said
        assert relay.passed[0].ended == direction


def test_reflected_frames_are_refused_at_both_ends(tmp_path):
    def attack(passed: Passed, direction: Direction, number: int, frame: bytes) -> bytes | None:
        if passed.number > 2:
            return None
        passed.inject(UP if direction == DOWN else DOWN, frame)
        return b""

    with (
        job(tmp_path / "run") as run,
        Relay(run.supervised.address, attack) as relay,
        joining(tmp_path, run, relay.address_text) as joiner,
    ):
        run.until(lambda: "far" in run.of(ViewChanged)[-1].hosts, 90.0)
        assert "tag of this session" in joiner.said


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        (DOWN, Dismissed(reason="go away", code=3)),
        (DOWN, Stop(reason="stopped by the attacker")),
        (UP, WorkerException(summary="made up", traceback="", phase="data", fault="user")),
        (UP, JournalLines(generation=1, lines=('{"type":"note","time":1.0,"text":"made up"}',))),
        (UP, MemberFinished(generation=1, progress=(10**6, 0, 0), hash="x")),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_relay_cannot_speak_in_a_workers_session(tmp_path, direction, message):
    """The joiner's worker connects through the relay too."""
    hit: list[Passed] = []

    def attack(passed: Passed, towards: Direction, number: int, frame: bytes) -> bytes | None:
        if not hit and towards == UP and kind_of(frame) == "Heartbeat":
            hit.append(passed)
            passed.inject(direction, forged(message))
        return None

    with (
        job(tmp_path / "run") as run,
        Relay(run.supervised.address, attack) as relay,
        joining(tmp_path, run, relay.address_text),
    ):
        wait_for(lambda: hit and hit[0].ended)
        run.until(lambda: "far" in run.of(ViewChanged)[-1].hosts, 90.0)
        assert "made up" not in (run.folder / "journal.jsonl").read_text()
        assert not run.of(WorkerFailed)
    assert hit[0].ended == direction


def test_a_certificate_of_the_authority_without_the_token_is_refused(tmp_path):
    authority = Authority(tmp_path)
    third = authority.issue("third")
    mark = tmp_path / "mark"
    code = attack_with_code(mark)

    def attack(passed: Passed, direction: Direction, number: int, frame: bytes) -> bytes | None:
        if direction == DOWN:
            passed.inject(DOWN, code)
            return b""
        passed.attacked = True
        return forged(ToolRequest(what="stop", text="stopped by the attacker"))

    with (
        job(tmp_path / "run", authority.issue("job")) as run,
        Relay(run.supervised.address, attack, (third.server(), third.client())) as relay,
    ):
        with joining(tmp_path, run, relay.address_text, authority.issue("joiner")) as joiner:
            assert joiner.process.wait(60.0) == 1
        assert "shows certificates" in joiner.said
        assert relay.passed
        # Neither end sent anything after the proof that failed.
        assert not any(one.frames[UP] or one.frames[DOWN] for one in relay.passed)
        assert not mark.exists()


def test_with_tls_each_end_may_have_a_certificate_of_its_own(tmp_path):
    authority = Authority(tmp_path)
    with (
        job(tmp_path / "run", authority.issue("job")) as run,
        Relay(run.supervised.address) as relay,
        joining(tmp_path, run, relay.address_text, authority.issue("joiner")),
    ):
        run.until(lambda: "far" in run.of(ViewChanged)[-1].hosts, 90.0)


def test_the_end_message_of_a_relay_does_not_end_a_joiner(tmp_path):
    def attack(passed: Passed, direction: Direction, number: int, frame: bytes) -> bytes | None:
        if passed.number == 1 and direction == DOWN and number == 0:
            passed.inject(DOWN, forged(AgentEnd(member=-1, reason="go", code=0)))
        return None

    with (
        job(tmp_path / "run") as run,
        Relay(run.supervised.address, attack) as relay,
        joining(tmp_path, run, relay.address_text) as joiner,
    ):
        run.until(lambda: "far" in run.of(ViewChanged)[-1].hosts, 90.0)
        assert joiner.process.poll() is None
