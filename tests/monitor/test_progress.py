"""How progress reads: lines in a file, a bar on a terminal, time left, and numbers for a glance."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console
from tests.virtual_clock import VirtualClock

from paceline.monitor.number_format import clock_time, duration, number, rate
from paceline.monitor.progress import ProgressDisplay
from paceline.train.callbacks import RunInfo
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord
from paceline.train.settings.train_config import DynamicBatch, TrainConfig

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def without_escapes(text):
    """Return the text with a new line wherever the cursor was sent elsewhere."""
    return ESCAPES.sub("", re.sub("\x1b[78]", "\n", text))


def played(*, steps=6, terminal=False, width=100, seconds=1.0, **settings):
    """What a run of `steps` steps in two epochs shows, one step a second by the given clock."""
    out = io.StringIO()
    clock = VirtualClock()
    config = TrainConfig(**{"epochs": 2, "log_every": 2, **settings})
    progress = ProgressDisplay(
        Console(file=out, force_terminal=terminal, width=width, color_system=None), clock=clock
    )
    progress.on_start(RunInfo(config=config, workers=4, total_steps=steps, samples=600, run_dir="runs/x"))
    records, evaluations = [], []
    for step in range(1, steps + 1):
        clock.advance(seconds)
        epoch = (step - 1) // (steps // 2)
        record = StepRecord(step=step, epoch=epoch, loss=1.0 / step, samples=200, seconds=seconds)
        records.append(record)
        progress.on_step(record)
        if step % (steps // 2) == 0:
            metrics = {"accuracy": 0.5 + 0.1 * epoch, "loss": 0.75}
            evaluations.append(Evaluation(step=step, epoch=epoch, metrics=metrics, samples=90, seconds=0.02))
            progress.on_evaluation(evaluations[-1])
            progress.on_epoch(EpochRecord(epoch=epoch, steps=3, samples=600, loss=0.5, seconds=3.0))
    progress.on_end(
        History(
            total_time=6.5,
            state_hash="0123456789abcdef" * 4,
            steps=tuple(records),
            evaluations=tuple(evaluations),
            workers=4,
        )
    )
    return out.getvalue()


def test_a_file_gets_plain_lines():
    assert played().splitlines() == [
        "training on 600 samples with 4 workers (cpu): batches of 32, 6 steps; runs/x",
        "epoch 0/1, step 2/6, loss 0.9000, 200 samples/s, 0:00:04 left, 4 workers",
        "epoch 0/1: loss 0.5000; validation loss 0.7500, accuracy 0.5000; 600 samples in 3.0 s",
        "epoch 1/1, step 4/6, loss 0.6793, 200 samples/s, 0:00:02 left, 4 workers",
        "epoch 1/1, step 6/6, loss 0.5001, 200 samples/s, 0:00:00 left, 4 workers",
        "epoch 1/1: loss 0.5000; validation loss 0.7500, accuracy 0.6000; 600 samples in 3.0 s",
        "done: 6 steps in 6.5 s, 200 samples/s, loss 0.2056, best accuracy 0.6000 (epoch 1), "
        "state 0123456789abcdef",
    ]


def test_evaluations_between_epochs_have_lines_of_their_own():
    lines = played(evaluate_every=3).splitlines()
    assert "epoch 0, step 3: validation loss 0.7500, accuracy 0.5000 (20 ms)" in lines


def test_slow_steps_get_a_line_although_it_is_not_their_turn():
    lines = played(seconds=40.0, log_every=1000).splitlines()
    assert sum("step " in line and "left" in line for line in lines) == 6


def test_a_terminal_gets_one_bar_that_ends_full():
    text = without_escapes(played(terminal=True))
    last = text.replace("\r", "\n").splitlines()
    bar = next(line for line in reversed(last) if "━" in line)
    assert re.fullmatch(r"epoch 1/1 ━+ 6/6 loss 0\.5001  200 samples/s  0:00:00 left  4 workers\s*", bar), bar
    assert last[-1].startswith("done: 6 steps")
    assert sum("validation" in line for line in last) == 2


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_drawn_line_is_wider_than_the_terminal(width):
    text = without_escapes(played(terminal=True, width=width))
    bars = [line for line in re.split(r"[\r\n]", text) if "━" in line or "samples/s  " in line]
    assert bars
    assert max(map(len, bars)) <= width


def test_the_cursor_comes_back_also_when_a_run_fails():
    out = io.StringIO()
    progress = ProgressDisplay(Console(file=out, force_terminal=True), clock=VirtualClock())
    progress.on_start(RunInfo(config=TrainConfig(), workers=1, total_steps=3))
    progress.close()
    progress.close()
    screen = Screen(25, 200)
    screen.write(out.getvalue())
    assert screen.region == (0, 24)
    assert out.getvalue().count("\x1b[r") == 1


class Screen:
    """A terminal of a few lines: what its screen shows after what several processes have written to it."""

    def __init__(self, height: int, width: int) -> None:
        self.lines, self.gone = [[" "] * width for _ in range(height)], list[str]()
        self.row = self.column = 0
        self.region, self.saved, self.width = (0, height - 1), (0, 0), width

    def write(self, text: str) -> None:
        for escape, plain in re.findall(r"\x1b(\[[0-9;?]*[A-Za-z]|[78])|([^\x1b])", text, re.DOTALL):
            self._obey(escape) if escape else self._put(plain)

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self.column = 0  # a terminal's driver adds the carriage return
            if self.row == self.region[1]:
                self.gone.append("".join(self.lines.pop(self.region[0])).rstrip())
                self.lines.insert(self.region[1], [" "] * self.width)
            else:
                self.row = min(self.row + 1, len(self.lines) - 1)
        else:
            self.lines[self.row][self.column] = letter
            self.column += 1

    def _obey(self, escape: str) -> None:
        numbers = [int(number) for number in re.findall(r"\d+", escape)]
        match escape[-1]:
            case "7":
                self.saved = self.row, self.column
            case "8":
                self.row, self.column = self.saved
            case "r":
                low, high = numbers or (1, len(self.lines))
                self.region, self.row, self.column = (low - 1, high - 1), 0, 0
            case "H":
                self.row, self.column = numbers[0] - 1, numbers[1] - 1
            case "K":
                self.lines[self.row] = [" "] * self.width
            case "A":
                self.row -= numbers[0]
            case "m":
                pass  # a colour
            case other:
                raise AssertionError(f"unknown: {other}")

    @property
    def shown(self) -> list[str]:
        return [line for line in ("".join(one).rstrip() for one in self.lines) if line]


@pytest.mark.parametrize("begin", [0, 3, 9], ids=["top", "middle", "bottom"])
def test_what_any_process_prints_does_not_tear_the_bar(begin):
    """Workers write to the terminal by themselves, between two draws of the bar; nothing is lost."""
    screen, clock, out = Screen(10, 100), VirtualClock(), io.StringIO()
    screen.write("\n" * begin)
    console = Console(file=out, force_terminal=True, width=100, height=10, color_system=None)
    progress = ProgressDisplay(console, clock=clock)

    def pass_on() -> None:
        screen.write(out.getvalue())
        out.seek(0)
        out.truncate()

    progress.on_start(RunInfo(config=TrainConfig(), workers=2, total_steps=20))
    pass_on()
    for step in range(1, 21):
        screen.write(f"print of a worker in step {step}\n")
        clock.advance(1.0)
        progress.on_step(StepRecord(step=step, epoch=0, loss=0.5, samples=8, seconds=1.0))
        pass_on()
        bars = [line for line in screen.shown if "━" in line]
        assert bars == [screen.shown[-1]]
        assert re.match(rf"epoch 0 [━╸╺]+ +{step}/20 loss 0.5000", bars[0])
    progress.on_end(History(total_time=20.0, state_hash="0" * 64))
    pass_on()
    screen.write("after the run\n")
    everything = [line for line in (*screen.gone, *screen.shown) if line]
    assert [line for line in everything if "worker in" in line] == [
        f"print of a worker in step {step}" for step in range(1, 21)
    ]
    assert everything[0].startswith("training on")
    assert sum("━" in line for line in everything) == 1
    assert everything[-2].startswith("done: ")
    assert everything[-1] == "after the run"


def test_a_terminal_that_changes_its_size_is_followed():
    screen, clock, out = Screen(8, 100), VirtualClock(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=10, color_system=None)
    progress = ProgressDisplay(console, clock=clock)
    progress.on_start(RunInfo(config=TrainConfig(), workers=2, total_steps=20))
    out.truncate(0)
    console.height = 8
    clock.advance(1.0)
    progress.on_step(StepRecord(step=1, epoch=0, loss=0.5, samples=8, seconds=1.0))
    screen.write(out.getvalue().lstrip("\0"))
    assert screen.region == (0, 6)
    assert "━" in screen.shown[-1]


def test_a_terminal_of_two_lines_gets_lines():
    out = io.StringIO()
    progress = ProgressDisplay(
        Console(file=out, force_terminal=True, width=80, height=2), clock=VirtualClock()
    )
    progress.on_start(RunInfo(config=TrainConfig(), workers=1, total_steps=3))
    assert "\x1b[r" not in out.getvalue()
    assert out.getvalue().startswith("training on")


def test_unknown_ends_and_resumed_runs_are_said():
    out = io.StringIO()
    clock = VirtualClock()
    progress = ProgressDisplay(Console(file=out, width=200), clock=clock)
    config = TrainConfig(max_steps=None, log_every=1, dynamic_batch=DynamicBatch(8, 64))
    progress.on_start(RunInfo(config=config, workers=1, first_step=40))
    clock.advance(0.5)
    progress.on_step(StepRecord(step=41, epoch=1, loss=math.nan, samples=8))
    progress.on_end(History(total_time=0.5, state_hash="", stopped="SIGTERM"))
    assert out.getvalue().splitlines() == [
        "training on an unknown number of samples with 1 worker (cpu): batches of 8 to 64, "
        "continuing after step 40",
        "epoch 1, step 41, loss nan, 16 samples/s, 1 worker",
        "stopped (SIGTERM): 0 steps in 500 ms, ? samples/s, loss nan, state ",
    ]


def test_the_first_step_does_not_spoil_the_time_left():
    """A first step of a minute, then one a second: ten are left, so ten seconds are."""
    out = io.StringIO()
    clock = VirtualClock()
    progress = ProgressDisplay(Console(file=out, width=200), clock=clock)
    progress.on_start(RunInfo(config=TrainConfig(log_every=5), workers=1, total_steps=15))
    for step in range(1, 6):
        clock.advance(60.0 if step == 1 else 1.0)
        progress.on_step(StepRecord(step=step, epoch=0, loss=1.0, samples=1))
    assert "step 5/15, loss 1.0000, 1 samples/s, 0:00:10 left" in out.getvalue()


def test_a_loss_that_was_not_a_number_is_forgotten_when_it_is_over():
    out = io.StringIO()
    clock = VirtualClock()
    progress = ProgressDisplay(Console(file=out, width=200), clock=clock)
    progress.on_start(RunInfo(config=TrainConfig(log_every=1), workers=1))
    for step, loss in enumerate([1.0, math.nan, 0.5], start=1):
        clock.advance(1.0)
        progress.on_step(StepRecord(step=step, epoch=0, loss=loss, samples=1))
    assert re.findall(r"loss (\S+),", out.getvalue()) == ["1.0000", "nan", "0.5000"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(0.0), "0.0000"),
        (number(0.4312), "0.4312"),
        (number(12345.6), "1.235e+04"),
        (number(1e-5), "1.000e-05"),
        (number(math.inf), "inf"),
        (rate(834.2), "834"),
        (rate(18_213), "18.2k"),
        (rate(1_314_000), "1.31M"),
        (rate(0.5), "0.5"),
        (rate(math.nan), "?"),
        (clock_time(12), "0:00:12"),
        (clock_time(90061), "1d 1:01:01"),
        (duration(0.012), "12 ms"),
        (duration(4.13), "4.1 s"),
        (duration(200), "3:20 min"),
        (duration(3723), "1:02:03 h"),
        (duration(float("inf")), "inf s"),
        (duration(float("nan")), "nan s"),
    ],
)
def test_numbers_for_a_glance(text, expected):
    assert text == expected


def shown_after(*records, between=0.0, workers=None):
    """The last line of a run of four workers whose steps are told `between` seconds after each other."""
    out, clock = io.StringIO(), VirtualClock()
    progress = ProgressDisplay(Console(file=out, width=200, color_system=None), clock=clock)
    progress.on_start(RunInfo(config=TrainConfig(log_every=1), workers=4, total_steps=100))
    for record in records:
        clock.advance(between)
        progress.on_step(record)
        if workers is not None:
            progress.on_workers(workers)
    return out.getvalue().splitlines()[-1]


def test_steps_that_are_told_in_a_burst_took_as_long_as_they_took():
    """The caller reads the journal now and then: ten steps of a second each come within microseconds."""
    records = [StepRecord(step=n, epoch=0, loss=1.0, samples=32, seconds=1.0) for n in range(1, 12)]
    line = shown_after(*records, between=1e-6)
    assert "32 samples/s" in line
    assert "0:01:29 left" in line


def test_the_number_of_workers_is_that_of_now():
    records = [StepRecord(step=n, epoch=0, loss=1.0, samples=32, seconds=1.0) for n in (1, 2)]
    assert shown_after(*records, between=1.0, workers=1).endswith("1 worker")
