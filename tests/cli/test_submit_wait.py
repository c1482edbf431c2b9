"""`paceline submit --wait`: what is said while a run waits, what is forgiven, and what is deleted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.virtual_clock import VirtualClock

from paceline.cli.submit_wait import follow
from paceline.core.errors import CommTimeoutError, PacelineError, PeerLostError, UnavailableError
from paceline.engines.batch import BatchSpec, BatchStatus, NewLines

AWAY = UnavailableError("the server cannot be reached", remedy="wait")


class ScriptedBatch:
    """A `BatchEngine` whose run has these states, one after the other; the last for ever."""

    def __init__(
        self, *states: BatchStatus | PacelineError, stop: PacelineError | None = None, chatty: bool = False
    ) -> None:
        self.states, self.asked, self.stopped = list(states), 0, 0
        self.stop_error = stop
        self.chatty = chatty  # a run that writes without a pause

    def batch_text(self, job: BatchSpec) -> str:
        return ""

    def submit_batch(self, job: BatchSpec) -> str:
        return "job/run"

    def batch_status(self, identifier: str) -> BatchStatus:
        self.asked += 1
        found = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(found, PacelineError):
            raise found
        return found

    def batch_logs(self, identifier: str) -> NewLines:
        given: list[str] = []

        def fresh(is_over: bool) -> Sequence[str]:
            is_new = f"line {self.asked}" not in given or (self.chatty and not is_over)
            lines = [f"line {self.asked}"] if is_new else []
            given.extend(lines)
            return lines

        return fresh

    def stop_batch(self, identifier: str) -> None:
        self.stopped += 1
        if self.stop_error is not None:
            raise self.stop_error


def wait(engine: ScriptedBatch) -> int:
    return follow(engine, "job/run", VirtualClock(autojump=True))


RUNNING, DONE = BatchStatus("running"), BatchStatus("succeeded", 0)


def test_each_reason_to_wait_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    quota, nodes = BatchStatus("pending", reason="exceeded quota"), BatchStatus("pending", reason="no node")
    assert wait(ScriptedBatch(BatchStatus("pending"), quota, quota, nodes, nodes, RUNNING, DONE)) == 0
    said = capsys.readouterr()
    assert said.err == "job/run waits: exceeded quota\njob/run waits: no node\n"
    assert said.out == "".join(f"line {number}\n" for number in range(1, 8))


@pytest.mark.parametrize("error", [AWAY, CommTimeoutError("no answer in 15 s")])
def test_an_engine_that_is_away_for_a_while_ends_no_wait(
    capsys: pytest.CaptureFixture[str], error: PacelineError
) -> None:
    assert wait(ScriptedBatch(RUNNING, error, error, RUNNING, error, BatchStatus("failed", 3, "why"))) == 3
    away = f"{error.message}; it is asked again\n"
    assert capsys.readouterr().err == f"{away}{away}job/run failed: why\n"


@pytest.mark.parametrize(("code", "shown"), [(3, 3), (-9, 137), (-15, 143)])
def test_a_run_that_a_signal_ended_has_the_code_that_a_shell_gives_it(code: int, shown: int) -> None:
    assert wait(ScriptedBatch(RUNNING, BatchStatus("failed", code, "FAILED"))) == shown


def test_an_engine_that_stays_away_is_given_up_and_the_run_is_not() -> None:
    engine = ScriptedBatch(RUNNING, AWAY)
    with pytest.raises(UnavailableError, match="cannot be reached") as told:
        wait(engine)
    assert engine.asked > 100
    assert "job/run may run on" in told.value.__notes__[-1]
    assert engine.stopped == 0


def test_a_run_that_never_ran_is_deleted() -> None:
    engine = ScriptedBatch(
        BatchStatus("pending"), BatchStatus("failed", reason="no such image\n  try: push it")
    )
    with pytest.raises(PeerLostError) as told:
        wait(engine)
    assert engine.stopped == 1
    assert str(told.value) == "job/run failed: no such image\n  try: push it"


def test_a_run_that_has_run_is_not_deleted() -> None:
    engine = ScriptedBatch(RUNNING, BatchStatus("failed", reason="no such image"))
    with pytest.raises(PeerLostError, match="no such image"):
        wait(engine)
    assert engine.stopped == 0


def test_a_run_whose_first_pod_comes_again_has_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its node was drained, and no pod is left that would tell that it has run."""
    guess = BatchStatus("failed", reason="the image cannot be pulled", never_ran=True)
    assert wait(ScriptedBatch(RUNNING, guess, guess, RUNNING, DONE)) == 0
    assert capsys.readouterr().err == "job/run waits: the image cannot be pulled\n"


def test_the_state_of_a_run_that_writes_without_a_pause_is_asked_for() -> None:
    engine = ScriptedBatch(*[RUNNING] * 50, DONE, chatty=True)
    assert wait(engine) == 0
    assert engine.asked == 51


def test_what_cannot_be_deleted_is_said_beside_the_reason() -> None:
    with pytest.raises(PeerLostError, match="no such image") as told:
        wait(ScriptedBatch(BatchStatus("failed", reason="no such image"), stop=AWAY))
    assert told.value.__notes__ == ["job/run is still there: the server cannot be reached\n  try: wait"]
