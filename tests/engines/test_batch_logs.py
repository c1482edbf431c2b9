"""Logs of a run that was handed over: every line once, from files that grow side by side."""

from __future__ import annotations

from paceline.engines.batch import new_lines


def test_files_that_grow_side_by_side_give_every_line_once():
    files = {"0": "a\n"}
    fresh = new_lines(lambda: files)
    assert fresh(False) == ["a"]
    assert fresh(False) == []
    files["1"] = "x\ny\n"
    assert fresh(False) == ["x", "y"]
    files["0"] += "b\nc\n"  # in front of the other file's lines
    files["1"] += "z\n"
    assert fresh(False) == ["b", "c", "z"]
    del files["0"]
    assert fresh(False) == []


def test_a_line_is_given_once_it_is_whole_or_the_run_is_over():
    text = "step 1\nst"
    fresh = new_lines(lambda: {"0": text})
    assert fresh(False) == ["step 1"]
    text += "ep 2\n 10%\r 20%"  # a progress bar writes over its line
    assert fresh(False) == ["step 2"]
    assert fresh(False) == []
    assert fresh(True) == [" 10%\r 20%"]
    assert fresh(True) == []
