"""The tool that plants bugs: what is caught, what survives, what is excused, and that its lists are true."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench.mutants.operators import Mutant, mutants_of
from bench.mutants.planted import PLANTED, planted
from bench.mutants.reach import function_at
from bench.mutants.score import ROOT, allotted, area_of, drawn, excuses, shown, tried
from bench.mutants.targets import AREAS, Area

SOURCE = '''"""Least of two, and a limit."""


def least(one: int, other: int) -> int:
    return one if one < other else other


def limited(value: int) -> int:
    if value > 9 and value != 12:
        value = 9
    return value
'''
TESTS = """from tiny import least, limited


def test_least():
    assert (least(1, 2), least(3, 2)) == (1, 2)


def test_limited():
    assert [limited(value) for value in (5, 9, 10, 12)] == [5, 9, 9, 12]
"""


def changed(mutants: list[Mutant], change: str) -> Mutant:
    return next(one for one in mutants if one.change == change)


def test_a_planted_bug_is_caught_and_an_equivalent_change_survives_unless_it_is_excused(
    tmp_path: Path,
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/tiny.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_tiny.py").write_text(TESTS)
    found = mutants_of("src/tiny.py", SOURCE)
    bug, same, excused = (
        changed(found, change)
        for change in (
            "one < other -> one >= other",
            "one < other -> one <= other",
            "value > 9 -> value >= 9",
        )
    )
    area = Area("tiny", 1, ("src/tiny.py",), ("tests/test_tiny.py",))
    score = tried(
        [bug, same, excused],
        jobs=1,
        timeout=20.0,
        root=tmp_path,
        areas=lambda path: area,
        preloaded=("pytest",),
        excused={excused.key: "9 is the limit itself"},
    )
    fate = {one.mutant: one for one in score.verdicts}
    assert fate[bug].by == "tests/test_tiny.py::test_least"
    assert [one.mutant for one in score.survivors] == [same]
    assert [one.mutant for one in score.equivalent] == [excused]
    assert score.share == 0.5
    assert "src/tiny.py:5: comparison: one < other -> one <= other" in score.text()
    assert "  tiny                    1 of    2   50.0%" in score.text()


def test_a_loop_without_an_end_is_caught_by_the_processor_time_that_it_uses(tmp_path: Path) -> None:
    source = "def spent(left: int) -> int:\n    while left > 0:\n        left -= 1\n    return left\n"
    tests = "from tiny import spent\n\n\ndef test_spent():\n    assert spent(3) == 0\n"
    (tmp_path / "src").mkdir()
    (tmp_path / "src/tiny.py").write_text(source)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_tiny.py").write_text(tests)
    loop = changed(mutants_of("src/tiny.py", source), "drop left -= 1")
    area = Area("tiny", 1, ("src/tiny.py",), ("tests/test_tiny.py",))
    score = tried(
        [loop], jobs=1, timeout=1.5, root=tmp_path, areas=lambda path: area, preloaded=("pytest",), excused={}
    )
    assert [one.by for one in score.verdicts] == ["no end within 1.5 s of processor time"]


def test_changes_of_a_file():
    changes = {one.change for one in mutants_of("tiny.py", SOURCE)}
    assert {
        "one if one < other else other -> (other if one < other else one)",
        "drop value > 9 and",
        "drop and value != 12",
        "value > 9 and value != 12 -> True",
        "value > 9 and value != 12 -> False",
        "value != 12 -> value == 12",
        "9 -> 10",
        "12 -> 13",
    } <= changes
    assert all(one.applied(SOURCE) != SOURCE for one in mutants_of("tiny.py", SOURCE))


def test_branches_are_swapped_and_arms_of_a_match_dropped_one_at_a_time():
    text = """def f(x):
    if x > 1:
        x = 2
    else:
        x = 3
    if x:
        x = 4
    match x:
        case int():
            return 1
        case str() if x:
            return 2
        case None:
            pass
        case _:
            raise TypeError(x)
"""
    found = [one for one in mutants_of("f.py", text) if one.kind in ("branch", "case")]
    assert [one.change for one in found] == [
        "x > 1 -> not (x > 1)",
        "drop case int()",
        "drop case if x",
    ]
    assert [one.applied(text).splitlines()[one.line - 1].strip() for one in found] == [
        "if not (x > 1):",
        "case int() if False:",
        "case str() if False:",
    ]


def test_words_types_and_assertions_are_left_alone():
    words = 'def f(x: int | None) -> str:\n    assert x == 1\n    return f"{x + 1}"\n'
    text = f"Kind: TypeAlias = int | str\n{words}"
    assert mutants_of("words.py", text) == []


def test_the_function_of_a_line():
    text = "A = 1\n\n\nclass C:\n    def f(self):\n        def g():\n            return 1\n        return g\n"
    assert [function_at(text, line) for line in (1, 5, 7, 8)] == [None, None, "C.f", "C.f"]


def test_equal_seeds_draw_equal_mutants_and_others_do_not():
    first = [shown(one) for one in drawn(1, 20, "shard_assignment.py")]
    assert first == [shown(one) for one in drawn(1, 20, "shard_assignment.py")]
    assert first != [shown(one) for one in drawn(2, 20, "shard_assignment.py")]
    assert len(first) == 20


def test_a_number_is_divided_by_shares_and_none_gets_more_than_is_there():
    assert allotted(10, [3, 2], [99, 99]) == [6, 4]
    assert allotted(10, [3, 2], [99, 1]) == [9, 1]
    assert allotted(10, [3, 2], [4, 2]) == [4, 2]
    assert allotted(0, [3, 2], [4, 2]) == [0, 0]


def test_every_area_is_drawn_from():
    found = Counter(area_of(one.path).name for one in drawn(5, 300, ""))
    assert found.total() == 300
    assert found["deciding machine"] >= 100
    assert found["member machine"] >= 60
    assert found["assignment of shards"] + found["slices of a batch"] >= 60
    assert found["canonical order"] >= 40


def test_every_area_has_files_and_tests():
    for area in AREAS:
        assert area.paths(ROOT), area.name
        assert area.test_paths(ROOT), area.name


def test_what_is_planted_by_hand_is_planted():
    assert len(planted(ROOT)) == len(PLANTED)


def test_every_excuse_is_for_a_change_that_can_be_made():
    possible = {
        one.key
        for area in AREAS
        for path in area.paths(ROOT)
        for one in mutants_of(path, (ROOT / path).read_text(encoding="utf-8"))
    }
    stale = [key for key in excuses() if key not in possible]
    assert stale == []
