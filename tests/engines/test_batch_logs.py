"""Logs of a run that was handed over: every line once, from files that grow side by side."""

from __future__ import annotations

from paceline.engines.batch import new_lines


def test_files_that_grow_side_by_side_give_every_line_once():
    files: dict[str, list[str]] = {"0": ["a"]}
    fresh = new_lines(lambda: files)
    assert fresh() == ["a"]
    assert fresh() == []
    files["1"] = ["x", "y"]
    assert fresh() == ["x", "y"]
    files["0"] += ["b", "c"]  # in front of the other file's lines
    files["1"] += ["z"]
    assert fresh() == ["b", "c", "z"]
    del files["0"]
    assert fresh() == []
