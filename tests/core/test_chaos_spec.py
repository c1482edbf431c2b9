"""Faults on demand as text and values: parsing, round trips, refused words, and who meets what."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from paceline.core.chaos_spec import Chaos, Fault, RandomFaults
from paceline.core.errors import ConfigError
from paceline.core.faults import KINDS, PHASES

ISSUE = (
    "kill rank=2 step=20; hang rank=1 step=40 phase=collective; slow rank=0 factor=3; "
    "partition rank=3 for=5s; corrupt rank=1 step=60; oom rank=2"
)


def test_the_text_of_the_manual():
    assert Chaos(ISSUE).faults == (
        Fault(kind="kill", rank=2, step=20),
        Fault(kind="hang", rank=1, step=40, phase="collective"),
        Fault(kind="slow", rank=0, factor=3.0),
        Fault(kind="partition", rank=3, seconds=5.0),
        Fault(kind="corrupt", rank=1, step=60),
        Fault(kind="oom", rank=2),
    )
    assert str(Chaos(ISSUE)) == ISSUE
    assert Chaos(ISSUE).ranks == (0, 1, 2, 3)


def test_random_form():
    (faults,) = Chaos("random kinds=kill,hang rate=0.02 seed=3 until=200").random
    assert faults == RandomFaults(kinds=("kill", "hang"), rate=0.02, seed=3, until=200)
    assert str(faults) == "random kinds=kill,hang rate=0.02 seed=3 until=200"


@pytest.mark.parametrize("text", ["", "  ;; \n ;", "\n"])
def test_nothing_is_no_chaos(text):
    assert not Chaos(text)
    assert str(Chaos(text)) == ""
    assert Chaos(text) == Chaos()


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("200ms", 0.2), ("1m", 60.0), ("2.5", 2.5), ("1e-3s", 1e-3)]
)
def test_durations(text, seconds):
    assert Chaos(f"hang rank=0 for={text}").faults[0].seconds == seconds


def test_a_signal_can_come_within_a_phase():
    (fault,) = Chaos("kill rank=1 step=3 phase=collective after=2ms").faults
    assert fault == Fault(kind="kill", rank=1, step=3, phase="collective", after=0.002)
    assert str(fault) == "kill rank=1 step=3 phase=collective after=0.002s"
    with pytest.raises(ConfigError, match="after"):
        Chaos("hang rank=1 after=2ms")
    with pytest.raises(ConfigError, match="past"):
        Fault(kind="kill", rank=1, after=-1.0)


def test_parts_are_put_together():
    kill = Fault(kind="kill", rank=1)
    assert Chaos("slow rank=0 factor=2", kill, Chaos("oom rank=3")) == Chaos(
        "slow rank=0 factor=2; kill rank=1; oom rank=3"
    )
    assert hash(Chaos(kill)) == hash(Chaos("kill rank=1"))
    assert pickle.loads(pickle.dumps(Chaos(ISSUE))) == Chaos(ISSUE)
    assert repr(Chaos(kill)) == "Chaos('kill rank=1')"


@pytest.mark.parametrize(
    ("text", "word", "shown"),
    [
        ("kil rank=1", "'kil'", "did you mean kill?"),
        ("explode rank=1", "'explode'", "choose from kill, exit, raise"),
        ("kill rnk=1", "'rnk'", "rank, step, phase, times, attempt"),
        ("kill rank=1 factor=2", "'factor'", "choose from rank"),
        ("kill rank=1 phase=lunch", "'lunch'", "data, forward, backward, collective"),
        ("kill rank=1 step", "'step'", "step=..."),
        ("kill rank=1 step=", "'step='", "step=..."),
        ("kill rank=1 step=x", "step=x", "whole number"),
        ("kill rank=1 step=0", "step=0", "1 or more"),
        ("kill rank=-1", "rank=-1", "0 or more"),
        ("kill rank=one", "rank=one", "all"),
        ("kill step=2", "names no rank", "rank=all"),
        ("kill rank=1 rank=2", "rank is given twice", "rank=2"),
        ("exit rank=1 code=256", "code=256", "255"),
        ("slow rank=1 factor=0.5", "factor=0.5", "1 or more"),
        ("slow rank=1 factor=nan", "factor=nan", "1 or more"),
        ("slow rank=1 phase=data", "'phase'", "factor"),
        ("hang rank=1 for=soon", "for=soon", "for=5s"),
        ("hang rank=1 for=0s", "for=0", "above 0"),
        ("hang rank=1 for=-1s", "for=-1s", "for=5s"),
        ("kill rank=1 times=0", "times=0", "1 or more"),
        ("kill rank=1 attempt=0", "attempt=0", "1 or more"),
        ("random rate=0.1", "kinds", "kinds=kill,hang"),
        ("random kinds=kill", "rate", "rate=0.02"),
        ("random kinds=kill rate=2", "rate=2", "between 0 and 1"),
        ("random kinds=kill rate=nan", "rate=nan", "between 0 and 1"),
        ("random kinds=kil rate=0.1", "'kil'", "did you mean kill?"),
        ("random kinds=, rate=0.1", "no kind", "kinds="),
        ("random kinds=kill rate=0.1 from=9 until=3", "until=3", "9 or more"),
        ("random kinds=kill rate=0.1 for=3s", "'for'", "hang"),
        ("random kinds=kill rate=0.1 seed=-1", "seed=-1", "0 or more"),
    ],
)
def test_what_is_wrong_is_named_and_what_is_allowed_shown(text, word, shown):
    with pytest.raises(ConfigError) as caught:
        Chaos(text)
    assert word in caught.value.message
    assert shown in str(caught.value)
    assert caught.value.remedy


def test_values_are_checked_like_text():
    with pytest.raises(ConfigError, match="whole number"):
        Fault(kind="kill", rank="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a number"):
        Fault(kind="hang", rank=2, seconds="5s")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is no fault"):
        Chaos(3)  # type: ignore[arg-type]


whole = st.none() | st.integers(1, 10**9)
lives = whole | st.just("all")
length = st.none() | st.floats(1e-9, 1e9)


@st.composite
def faults(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    fields = {
        "step": draw(whole),
        "phase": draw(st.none() | st.sampled_from(PHASES)),
        "factor": draw(st.none() | st.floats(1.0, 1e6)),
        "seconds": draw(length),
        "times": draw(whole),
        "code": draw(st.none() | st.integers(0, 255)),
    }
    allowed = {"seconds" if name == "for" else name for name in KINDS[kind]}
    given_fields = {name: value for name, value in fields.items() if name in allowed}
    return Fault(kind=kind, rank=draw(st.none() | st.integers(0, 10**6)), attempt=draw(lives), **given_fields)


@st.composite
def random_faults(draw):
    kinds = draw(st.lists(st.sampled_from(["hang", "slow", "exit", "kill"]), min_size=1).map(tuple))
    return RandomFaults(
        kinds=kinds,
        rate=draw(st.floats(0.0, 1.0)),
        seed=draw(st.integers(0, 2**70)),
        first=draw(st.integers(1, 50)),
        until=draw(st.none() | st.integers(50, 10**9)),
        rank=draw(st.none() | st.integers(0, 100)),
        seconds=draw(length) if "hang" in kinds or "slow" in kinds else None,
        factor=draw(st.none() | st.floats(1.0, 1e6)) if "slow" in kinds else None,
        code=draw(st.none() | st.integers(0, 255)) if "exit" in kinds else None,
        attempt=draw(whole),
    )


@given(st.lists(faults() | random_faults(), max_size=5))
def test_text_reads_back_to_an_equal_value(parts):
    assert Chaos(str(Chaos(*parts))) == Chaos(*parts)


@given(st.text())
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ConfigError):
        Chaos(text)


@pytest.mark.parametrize(
    ("text", "lives"),
    [
        ("kill rank=2", [1, 2, 3, 4]),  # once, in whichever comes first
        ("kill rank=2 times=3", [1, 2, 3, 4]),
        ("kill rank=2 attempt=1", [1]),
        ("kill rank=2 attempt=2", [2]),
        ("kill rank=2 attempt=all", [1, 2, 3, 4]),
        ("kill rank=2 times=3 attempt=1", [1, 2, 3]),
        ("kill rank=2 times=2 attempt=all", [1, 2]),
        ("hang rank=2 for=1s times=3 attempt=1", [1]),
        ("hang rank=2 times=3 attempt=1", [1, 2, 3]),
    ],
)
def test_which_lives_of_a_rank_are_met(text, lives):
    (fault,) = Chaos(text).faults
    assert [life for life in range(1, 5) if fault.meets(2, life)] == lives
    assert not fault.meets(1, 1)
    assert Chaos(text.replace("rank=2", "rank=all")).faults[0].meets(7, lives[0])


def test_random_faults_are_a_function_of_seed_step_rank_and_life():
    chaos = RandomFaults(kinds=("kill", "hang", "slow"), rate=0.25, seed=3, until=400, seconds=1.0)
    places = [(step, rank, life) for step in range(1, 401) for rank in range(4) for life in (1, 2)]
    drawn = {place: chaos.draw(*place) for place in places}
    assert drawn == {place: chaos.draw(*place) for place in reversed(places)}
    found = [fault for fault in drawn.values() if fault is not None]
    assert 0.22 < len(found) / len(places) < 0.28
    assert {fault.kind for fault in found} == {"kill", "hang", "slow"}
    assert len({fault.phase for fault in found if fault.kind == "kill"}) == 5
    assert all(fault.step == step for (step, _, _), fault in drawn.items() if fault)
    # A replacement that comes back to the same step does not die the same death.
    lives = {life: {place[:2] for place in places if place[2] == life and drawn[place]} for life in (1, 2)}
    assert lives[1] != lives[2]
    assert chaos.draw(401, 0) is None
    other = RandomFaults(kinds=("kill", "hang", "slow"), rate=0.25, seed=4, until=400, seconds=1.0)
    assert [other.draw(*place) for place in places] != list(drawn.values())


def test_what_never_came_is_named_with_why():
    chaos = Chaos(
        "kill rank=9; kill rank=1 step=40; kill rank=1 step=4; hang rank=0 phase=evaluation",
        "corrupt rank=all; random kinds=kill rate=0.1 rank=0; random kinds=kill rate=0.1 rank=7",
    )
    assert chaos.unmet({2}, {0, 1}, last_step=30) == [
        "kill rank=9 (there was no rank 9)",
        "kill rank=1 step=40 (the run ended after step 30)",
        "hang rank=0 phase=evaluation (no worker that it is for was in phase evaluation in time)",
        "corrupt rank=all (no worker that it is for was there in time)",
        "random kinds=kill rate=0.1 seed=0 rank=7 (there was no rank 7)",
    ]
    assert chaos.unmet(range(7), {0}, last_step=1) == []
    assert Chaos().unmet((), (), last_step=0) == []


def test_it_needs_no_torch():
    code = "import sys, paceline.core.chaos_spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
