"""Pictures of histories: formats by suffix, and what is said without matplotlib."""

from __future__ import annotations

import sys

import pytest

from paceline.core.errors import UnavailableError, UsageError
from paceline.monitor.plot import draw
from paceline.train.history import Evaluation, History, StepRecord

HISTORY = History(
    total_time=1.0,
    state_hash="00",
    steps=tuple(StepRecord(step=n, epoch=0, loss=1.0 / n, samples=1) for n in range(1, 100)),
    evaluations=(Evaluation(step=99, epoch=0, metrics={"loss": 0.1, "accuracy": 0.9}),),
)


@pytest.mark.parametrize(
    ("suffix", "start"),
    [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("html", b"<!doctype html>")],
)
def test_the_suffix_decides(tmp_path, suffix, start):
    if suffix != "html":
        pytest.importorskip("matplotlib")
    path = HISTORY.plot(tmp_path / "new" / f"curves.{suffix}")
    assert path.read_bytes().startswith(start)


def test_a_run_without_records_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw([History(total_time=0.0, state_hash="")], tmp_path / "empty.png").stat().st_size > 0


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"the suffix '\.gif' is not one of \.png, \.svg, \.pdf, \.html"):
        HISTORY.plot(tmp_path / "curves.gif")
    with pytest.raises(UsageError, match="at least one history"):
        draw([], tmp_path / "curves.png")


def test_without_matplotlib_the_remedy_names_both_ways_out(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnavailableError, match="matplotlib, which is not installed") as raised:
        HISTORY.plot(tmp_path / "curves.png")
    assert "paceline[plot]" in raised.value.remedy
    assert ".html" in raised.value.remedy
    assert HISTORY.plot(tmp_path / "curves.html").is_file()
