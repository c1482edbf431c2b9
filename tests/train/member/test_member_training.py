"""The end of a worker whose code raised: what it reports, saves and leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.member.small_member import member

from paceline.control.messages import WorkerException
from paceline.train.member import member_training
from paceline.train.member.membership import OrphanedError, ReleasedError
from paceline.train.settings.train_config import CheckpointConfig


class EndingMembership:
    """A membership in a view of two that agrees to save, and then ends in one way."""

    def __init__(self, run: Any, ending: str, joins: Callable[[], None] = lambda: None) -> None:
        self.calls: list[str] = []
        self.saving_after_error = "in view"
        self.unsaved: str | None = None
        self._run, self._ending, self._joins = run, ending, joins

    def failed(self, error: BaseException, text: str, *, phase: str, holds: bool) -> None:
        self.calls.append(f"failed in {phase}, holds={holds}")

    def join(self) -> None:
        self._joins()
        self._run.state.failing = True

    def rejoin(self, error: BaseException | None) -> None:
        self.calls.append("rejoin")

    def finish(self, digest: str) -> str:
        self.calls.append(f"finish {digest}")
        return self._ending

    def why_unsaved(self) -> str | None:
        return self.unsaved

    def spool_undelivered(self) -> None:
        self.calls.append("spool")


def run_of_two() -> Any:
    """As much of a Run in a group of two as its failure needs."""
    state = SimpleNamespace(failing=False, final_hashes=[["abc", False, None]])
    parts = SimpleNamespace(phases=SimpleNamespace(name="forward"))
    return SimpleNamespace(state=state, parts=parts, conclude=lambda: True)


@pytest.mark.parametrize(("ending", "spools"), [("dismissed", []), ("orphaned", ["spool"])])
def test_a_worker_that_failed_and_lost_its_supervisor_leaves_its_messages_behind(ending, spools):
    run = run_of_two()
    membership: Any = EndingMembership(run, ending)
    member_training.handle_failure(membership, run, ValueError("no"))
    assert membership.calls == ["failed in forward, holds=True", "finish abc", *spools]


@pytest.mark.parametrize("unsaved", [None, "another member does"])
def test_a_worker_that_failed_and_was_orphaned_before_the_view_saves_alone(monkeypatch, unsaved):
    run, saved = run_of_two(), list[Any]()

    def joins() -> None:
        raise OrphanedError("the supervisor stayed away")

    monkeypatch.setattr(member_training, "save_alone", saved.append)
    membership: Any = EndingMembership(run, "dismissed", joins)
    membership.unsaved = unsaved
    member_training.handle_failure(membership, run, ValueError("no"))
    assert saved == ([run] if unsaved is None else [])
    assert membership.calls[-1] == "spool"


def test_a_worker_that_failed_and_is_let_go_only_ends():
    run = run_of_two()

    def joins() -> None:
        raise ReleasedError("not needed")

    membership: Any = EndingMembership(run, "dismissed", joins)
    member_training.handle_failure(membership, run, ValueError("no"))
    assert membership.calls == ["failed in forward, holds=True"]


def test_a_worker_that_is_alone_saves_before_it_reports(tmp_path):
    """Where the error is forgiven, another worker continues from there."""
    saves = {"checkpoint": CheckpointConfig(every_steps=100)}
    with member(tmp_path / "run", config=saves) as one:
        one.join()
        one.train()
        versions_at_report = []
        saver = one.run.parts.checkpointer
        assert saver is not None
        failed = one.membership.failed

        def report(*args: Any, **named: Any) -> None:
            versions_at_report.append(saver.newest_step)
            failed(*args, **named)

        one.membership.failed = report  # type: ignore[method-assign]
        member_training.handle_failure(one.membership, one.run, ValueError("no"))
        assert versions_at_report == [one.run.state.position.step]
        (told,) = one.sent(WorkerException)
        assert not told.holds
