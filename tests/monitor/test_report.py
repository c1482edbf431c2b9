"""Reports: one self-contained file, well formed, that says whether runs have the same bits."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from tests.monitor.report_pages import page, run

from paceline.core.errors import PlatformError, UsageError
from paceline.monitor import curves
from paceline.monitor.curves import Curve, smooth, thin
from paceline.monitor.report import write_report
from paceline.monitor.svg_chart import ChartLine, line_chart, tick_text
from paceline.train.history import History


def test_two_runs_with_the_same_bits(tmp_path):
    path = write_report(
        tmp_path / "sub" / "report.html", [run(1), run(4)], heading="Digits", notes=["4 shards."]
    )
    text, checker = page(path)
    shown = " ".join("".join(checker.text).split())
    assert "Same bits. Both runs ended with the state " + "ab" * 32 in shown
    assert "the losses of all 90 steps they share are equal to the last bit" in shown
    assert "1 worker" in shown
    assert "4 workers" in shown
    assert "4 shards." in shown
    assert checker.tags.count("svg") == 3  # training loss, validation loss, validation accuracy
    assert checker.tags.count("table") == 2
    assert checker.links == []
    assert not re.search(r"https?://|@import|url\(|<script", text)


def test_other_bits_are_said_with_the_step_where_they_began(tmp_path):
    runs = [
        run(1),
        run(2),
        run(3, "cd" * 32, change=lambda step, loss: loss + 1e-12 * (step > 41)),
        run(4, "ef" * 32),
    ]
    _, checker = page(write_report(tmp_path / "r.html", runs, ["one", "two", "three", "four"]))
    shown = "".join(checker.text)
    assert (
        "Different bits. Compared with one: three has another loss from step 42 on; four has the same losses"
        in shown
    )


def test_titles_are_text_and_never_markup(tmp_path):
    history = run(stopped="<script>alert(1)</script>")
    text, checker = page(write_report(tmp_path / "r.html", [history], ["<b>&"], heading="<i>"))
    assert "<script" not in text
    assert "<b>" not in text
    assert "<b>&" in "".join(checker.text)


@pytest.mark.parametrize(
    "history",
    [
        History(total_time=0.0, state_hash=""),
        run(steps=1),
        run(steps=5000),
        run(change=lambda step, loss: math.nan),
        run(change=lambda step, loss: math.inf if step % 7 == 0 else loss),
        run(change=lambda step, loss: 1e6 / step**4),
        run(change=lambda step, loss: -5.0),
    ],
    ids=["empty", "one step", "long", "only nan", "gaps", "log scale", "constant"],
)
def test_odd_runs_still_make_a_page(tmp_path, history):
    path = write_report(tmp_path / "r.html", [history, history])
    text, _ = page(path)
    coordinates = re.findall(r'd="([^"]*)"', text)
    assert not any("nan" in path or "inf" in path for path in coordinates)
    assert path.stat().st_size < 300_000


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at least one history"):
        write_report(tmp_path / "r.html", [])
    with pytest.raises(UsageError, match="1 title was given for 2 runs"):
        write_report(tmp_path / "r.html", [run(), run()], ["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot be written"):
        write_report(tmp_path / "file" / "r.html", [run()])


def test_equal_runs_are_told_apart_by_number():
    assert curves.names_of([run(2), run(2), run(1)], None) == [
        "2 workers (run 1)",
        "2 workers (run 2)",
        "1 worker",
    ]


def test_smoothing_keeps_the_start_and_thinning_keeps_the_spikes():
    falling = Curve(tuple(map(float, range(3000))), tuple(1.0 / (1 + n) for n in range(3000)))
    assert smooth(falling).y[0] == 1.0
    assert smooth(Curve((1.0, 2.0), (3.0, 4.0))).y == (3.0, 4.0)
    flat = Curve(falling.x, tuple(9.0 if n == 1234 else math.nan if n == 50 else 0.0 for n in range(3000)))
    few = thin(flat, 100)
    assert len(few.x) <= 140
    assert max(value for value in few.y if not math.isnan(value)) == 9.0
    assert (few.x[0], few.x[-1]) == (0.0, 2999.0)
    assert list(few.x) == sorted(few.x)


def test_training_metrics_stand_where_their_epoch_ended():
    history = run()
    record = dataclasses.replace(history.epochs[1], metrics={"f1": 0.5})
    history = dataclasses.replace(history, epochs=(history.epochs[0], record, history.epochs[2]))
    assert curves.training_metric(history, "f1") == Curve((60.0,), (0.5,))
    assert curves.epoch_ends(dataclasses.replace(history, steps=())) == {0: 30, 1: 60, 2: 90}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.1 + 0.2, "0.3"), (1500.0, "1,500"), (20000.0, "20k"), (1e-5, "1e-05"), (3e6, "3e+06")],
)
def test_ticks_are_short(value, text):
    assert tick_text(value) == text


def test_a_chart_has_a_handful_of_ticks_at_any_scale():
    for low, high in [(0.0, 2.6), (0.97, 0.991), (-1e-7, 1e-7), (5.0, 1e5), (1e-9, 1e9), (100.0, 100.5)]:
        chart = line_chart(
            [ChartLine("a", 0, Curve((1.0, 500.0), (low, high)))], x_label="step", y_label="y", width=500
        )
        horizontal = chart.count('class="grid"')
        assert 2 <= horizontal <= 12, (low, high, horizontal)
