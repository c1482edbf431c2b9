"""A link that does not carry everything: both ends say the same, and the choice is always the same."""

from __future__ import annotations

from tests.elastic.machine.heartbeats import keep_beating
from tests.elastic.machine.machine_driver import Driven, beat_of, dial_of, failure_at, only, some

from paceline.elastic.machine.actions import Action, InstallView, KillWorker, RecordVerdict, RequestDial
from paceline.elastic.machine.machine_events import AgentJoined, StopRequested
from paceline.elastic.machine.state import JobPhase


def on_machines(home: int, away: int, more: int = 0) -> Driven:
    """All in one view; agents 1 and 2 have `away` and `more` members."""
    job = Driven(home, 2 * (home + away + more)).running()
    for agent_id, count in ((1, away), (2, more)):
        if count:
            job.tell(AgentJoined(agent_id, count, f"host{agent_id}"))
    job.join_all()
    job.wait(0.5)
    job.form_view()
    return job


def blamed(job: Driven, **waits: tuple[int, ...]) -> RecordVerdict:
    """All are in a collective and wait as given, by "m3" for member 3, until one is blamed."""
    heartbeats = {
        name: beat_of(int(name[1:]), "collective", 0.0, (5, 0, 0), peers, 0.01, 0.02)
        for name, peers in waits.items()
    }
    return only(keep_beating(job, 20.0, **heartbeats), RecordVerdict)


def test_the_link_is_named_and_the_smaller_side_goes():
    assert blamed(on_machines(2, 1), m1=(3,), m2=(3,), m3=(1, 2)).slot == 2
    verdict = blamed(on_machines(1, 2), m1=(2,), m2=(1,), m3=(2,))
    assert verdict.slot == 0
    verdict = blamed(on_machines(1, 2), m1=(2, 3), m2=(1,), m3=(1,))
    assert verdict.slot == 0
    assert "rank 0 on the supervisor's host and rank 1 on host1 do not reach each other" in verdict.what
    assert "the link between the hosts is at fault" in verdict.what


def test_between_sides_of_one_size_the_supervisors_own_stays():
    assert blamed(on_machines(2, 2), m1=(3, 4), m2=(3, 4), m3=(1, 2), m4=(1, 2)).slot == 3


def test_a_third_machine_that_waits_for_both_ends_is_not_named():
    assert blamed(on_machines(1, 1, 1), m1=(2,), m2=(1,), m3=(1, 2)).slot == 1
    assert blamed(on_machines(1, 1, 2), m1=(2,), m2=(1,), m3=(1, 2), m4=(1, 2)).slot == 1


def test_on_one_machine_there_is_no_link_to_blame():
    assert "link" not in blamed(Driven(3, 6).running(), m1=(3,), m2=(3,), m3=(1,)).what


def broken(job: Driven, *said_of: tuple[int, int]) -> RecordVerdict:
    """Members say again and again that they did not reach others, until one is blamed."""
    told: list[Action] = []
    for _ in range(3):
        said: list[Action] = []
        for member, missed in said_of:
            view = job.state.view
            assert view is not None
            said += job.tell(failure_at(member, view.generation, "reset", (), (missed,)))
        told += said
        if job.state.pending:
            told += job.meet_all(said)
            told += job.report_all()
            told += job.install_all()
    return only(told, RecordVerdict)


def test_collectives_that_break_between_two_machines_name_the_link():
    for home, away, gone in ((2, 1, 2), (1, 2, 0)):
        for said in (((1, 3), (3, 1)), ((3, 1), (1, 3))):  # the order makes no difference
            verdict = broken(on_machines(home, away), *said)
            assert verdict.slot == gone
            assert "do not reach each other" in verdict.what


def test_one_that_no_peer_reaches_is_named_itself():
    verdict = broken(on_machines(3, 1), (1, 2), (3, 2), (4, 2), (2, 4))
    assert verdict.slot == 1
    assert "most often not reached" in verdict.what


HOLE = "rank 2 cannot reach rank 3 at 10.0.0.3:4: small packets arrive there and large ones do not"


def dials(actions: list[Action]) -> set[tuple[int, int]]:
    """Who was asked to dial whom: each request goes both ways."""
    pairs = [(told.member, peer) for told in some(actions, RequestDial) for peer in told.peers]
    return {*pairs, *((peer, member) for member, peer in pairs)}


def answer(job: Driven, asked: set[tuple[int, int]], *walls: tuple[int, int]) -> list[Action]:
    told: list[Action] = []
    for member, peer in sorted(asked):
        lost = (member, peer) in walls
        told += job.tell(dial_of(member, peer, f"from {member} to {peer}: {HOLE}" if lost else "", lost))
    return told


def test_the_verdict_has_what_the_dial_of_its_own_link_said():
    job = on_machines(2, 1, 1)
    asked = dials(job.tell(failure_at(1, job.state.generation, "a circle")))
    job.report_all()
    said = [verdict.what for verdict in some(answer(job, asked, (1, 3), (2, 4)), RecordVerdict)]
    assert sorted(what.partition(": from ")[2].partition(":")[0] for what in said) == ["1 to 3", "2 to 4"]


def test_after_a_break_members_of_different_machines_dial_each_other_before_the_next_view():
    job = on_machines(2, 1, 1)
    asked = dials(job.tell(failure_at(1, job.state.generation, "a circle")))
    # All pairs across machines: the one that broke waited for members behind a good link only.
    assert {frozenset(pair) for pair in asked} == {
        frozenset(pair) for pair in ((1, 3), (1, 4), (2, 3), (2, 4), (3, 4))
    }
    job.report_all()
    assert job.state.phase is JobPhase.PREPARING
    # One direction of one link is enough; no other is named, and no view with both ends is tried.
    told = answer(job, asked, (3, 4))
    verdict = only(told, RecordVerdict)
    assert verdict.slot == 3
    assert "rank 3 on host2 and rank 2 on host1 do not reach each other" in verdict.what
    assert verdict.what.endswith(HOLE)
    assert [kill.member for kill in some(told, KillWorker)] == [4]
    assert only(told, InstallView).plan.members == (1, 2, 3)


def test_one_that_is_cut_off_while_its_neighbours_reach_the_other_machine_goes_itself():
    job = on_machines(3, 1)  # members 1 to 3 at home, 4 on host1
    asked = dials(job.tell(failure_at(3, job.state.generation, "reset")))
    job.report_all()
    told = answer(job, asked, (3, 4), (4, 3))
    assert only(told, RecordVerdict).slot == 2
    assert "while others of the two hosts do" in only(told, RecordVerdict).what
    assert only(told, InstallView).plan.members == (1, 2, 4)


def test_links_that_are_well_cost_no_member_anything():
    job = on_machines(2, 1, 1)
    asked = dials(job.tell(failure_at(1, job.state.generation, "reset")))
    job.report_all()
    told = answer(job, asked)
    assert not some(told, RecordVerdict)
    assert len(only(told, InstallView).plan.members) == 4


def test_the_end_that_several_machines_do_not_reach_goes_and_all_of_its_machine_with_it():
    job = on_machines(2, 2, 1)  # members 1, 2 at home, 3, 4 on host1, 5 on host2
    asked = dials(job.tell(failure_at(5, job.state.generation, "reset")))
    job.report_all()
    told = answer(job, asked, *((one, other) for one in (3, 4) for other in (1, 2, 5)))
    assert sorted(kill.member for kill in some(told, KillWorker)) == [3, 4]
    assert only(told, InstallView).plan.members == (1, 2, 5)


def test_a_dial_that_is_refused_may_have_met_one_that_has_just_died():
    job = on_machines(1, 2)
    asked = dials(job.tell(failure_at(1, job.state.generation, "reset")))
    job.report_all()
    told: list[Action] = []
    for member, peer in sorted(asked):
        told += job.tell(dial_of(member, peer, "Connection refused" if peer == 3 else ""))
    assert not some(told, RecordVerdict)


def test_a_dial_without_an_answer_proves_nothing():
    job = on_machines(1, 1)
    job.beat_all(steps=5)
    job.tell(failure_at(1, job.state.generation, "reset"))
    job.report_all()
    told = job.wait(job.state.settings.check_seconds + 1.0)  # all beat meanwhile
    assert not some(told, RecordVerdict)
    assert len(some(told, InstallView)[0].plan.members) == 2


def test_a_job_of_one_machine_never_dials():
    job = Driven(3, 6).running()
    assert not dials(job.tell(failure_at(1, job.state.generation, "reset")))


def test_those_who_wait_for_each_other_dial_while_they_wait():
    job = on_machines(2, 1, 1)
    waits = {"m1": (2, 3, 4), "m2": (1, 3, 4), "m3": (4,), "m4": (3,)}
    heartbeats = {
        name: beat_of(int(name[1:]), "collective", 0.0, (5, 0, 0), peers, 0.01, 0.02)
        for name, peers in waits.items()
    }
    told = keep_beating(job, 3.0, **heartbeats)
    asked = dials(told)
    assert {(3, 4), (4, 3)} <= asked
    assert not some(told, RecordVerdict)
    verdict = only(answer(job, asked, (3, 4)), RecordVerdict)
    assert (verdict.slot, verdict.what.endswith(HOLE)) == (3, True)


def test_a_stop_does_not_wait_for_dials():
    job = on_machines(1, 1)
    job.tell(failure_at(1, job.state.generation, "reset"))
    job.report_all()
    assert only(job.tell(StopRequested("enough")), InstallView)
