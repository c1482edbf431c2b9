"""A link that does not carry everything: both ends say the same, and the choice is always the same."""

from __future__ import annotations

from tests.elastic.machine_driver import Driven, only
from tests.elastic.test_machine_deadlines import keep_beating

from paceline.elastic.model import Action, AgentCame, Beaten, HasBroken, NoteVerdict


def on_machines(home: int, away: int, more: int = 0) -> Driven:
    """All in one view; agents 1 and 2 have `away` and `more` members."""
    job = Driven(home, 2 * (home + away + more)).running()
    for place, count in ((1, away), (2, more)):
        if count:
            job.tell(AgentCame(place, count, f"host{place}"))
    job.join_all()
    job.wait(0.5)
    job.regroup()
    return job


def blamed(job: Driven, **waits: tuple[int, ...]) -> NoteVerdict:
    """All are in a collective and wait as given, by "m3" for member 3, until one is blamed."""
    beats = {
        name: Beaten(int(name[1:]), "collective", 0.0, (5, 0, 0), peers, 0.01, 0.02)
        for name, peers in waits.items()
    }
    return only(keep_beating(job, 20.0, **beats), NoteVerdict)


def test_the_link_is_named_and_the_smaller_side_goes():
    assert blamed(on_machines(2, 1), m1=(3,), m2=(3,), m3=(1, 2)).slot == 2
    verdict = blamed(on_machines(1, 2), m1=(2,), m2=(1,), m3=(2,))
    assert verdict.slot == 0
    verdict = blamed(on_machines(1, 2), m1=(2, 3), m2=(1,), m3=(1,))
    assert verdict.slot == 0
    assert "rank 0 on the supervisor's machine and rank 1 on host1 do not reach each other" in verdict.what
    assert "the link between the machines is at fault" in verdict.what


def test_between_sides_of_one_size_the_supervisors_own_stays():
    assert blamed(on_machines(2, 2), m1=(3, 4), m2=(3, 4), m3=(1, 2), m4=(1, 2)).slot == 3


def test_a_third_machine_that_waits_for_both_ends_is_not_named():
    assert blamed(on_machines(1, 1, 1), m1=(2,), m2=(1,), m3=(1, 2)).slot == 1
    assert blamed(on_machines(1, 1, 2), m1=(2,), m2=(1,), m3=(1, 2), m4=(1, 2)).slot == 1


def test_on_one_machine_there_is_no_link_to_blame():
    assert "link" not in blamed(Driven(3, 6).running(), m1=(3,), m2=(3,), m3=(1,)).what


def broken(job: Driven, *said: tuple[int, int]) -> NoteVerdict:
    """Members say again and again that they did not reach others, until one is blamed."""
    told: list[Action] = []
    for _ in range(3):
        for member, missed in said:
            view = job.state.view
            assert view is not None
            told += job.tell(HasBroken(member, view.generation, "reset", (), (missed,)))
        if job.state.waiting:
            told += job.report_all()
            told += job.install_all()
    return only(told, NoteVerdict)


def test_collectives_that_break_between_two_machines_name_the_link():
    for home, away, gone in ((2, 1, 2), (1, 2, 0)):
        for said in (((1, 3), (3, 1)), ((3, 1), (1, 3))):  # the order makes no difference
            verdict = broken(on_machines(home, away), *said)
            assert verdict.slot == gone
            assert "do not reach each other" in verdict.what


def test_one_that_nobody_reaches_is_named_itself():
    verdict = broken(on_machines(3, 1), (1, 2), (3, 2), (4, 2), (2, 4))
    assert verdict.slot == 1
    assert "most often not reached" in verdict.what
