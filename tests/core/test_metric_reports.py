"""Numbers that the user's code reports: sinks, journals, mistakes."""

from __future__ import annotations

import threading

import numpy
import pytest
import torch

import paceline
from paceline.core import journal, log, metric_reports
from paceline.core.events import MetricReported


@pytest.fixture
def received():
    found: list[tuple[str, float, dict[str, str]]] = []
    sink = paceline.metrics.add_sink(lambda *report: found.append(report))
    yield found
    paceline.metrics.remove_sink(sink)


def test_a_sink_gets_name_value_and_tags(received):
    paceline.metrics.report("a", 1)
    paceline.metrics.report("b", torch.tensor([2.5]), {"split": "test", "fold": 3})
    paceline.metrics.report("c", numpy.float32(0.5), None)
    paceline.metrics.report("d", float("nan"))
    assert received[:3] == [("a", 1.0, {}), ("b", 2.5, {"split": "test", "fold": "3"}), ("c", 0.5, {})]
    assert repr(received[3][1]) == "nan"


def test_a_sink_that_raises_is_said_once_and_stops_nothing(received, caplog):
    @paceline.metrics.add_sink
    def broken(name: str, value: float, tags: dict[str, str]) -> None:
        raise RuntimeError("no connection")

    paceline.metrics.report("a", 1)
    paceline.metrics.report("a", 2)
    paceline.metrics.remove_sink(broken)
    paceline.metrics.report("a", 3)
    assert [value for _, value, _ in received] == [1.0, 2.0, 3.0]
    assert caplog.text.count("no connection") == 1


def test_the_journal_is_that_of_the_rank_also_from_its_other_threads(received):
    found: dict[int, list[MetricReported]] = {0: [], 1: []}
    with metric_reports.journal_of(0, found[0].append):
        other = threading.Thread(target=paceline.metrics.report, args=("from a thread", 1))
        other.start()
        other.join()
        with metric_reports.journal_of(1, found[1].append), log.at(rank=1, step=7):
            paceline.metrics.report("here", 2)
    paceline.metrics.report("nowhere", 3)
    assert [(one.name, one.rank, one.step) for one in found[0]] == [("from a thread", 0, 0)]
    assert [(one.name, one.rank, one.step) for one in found[1]] == [("here", 1, 7)]
    assert len(received) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", 1), "a metric's name is text"),
        ((7, 1), "a metric's name is text"),
        (("a", "1"), "was reported as a str, which is not one number"),
        (("a", torch.ones(2)), "was reported as a Tensor"),
        (("a", None), "was reported as a NoneType"),
        (("a", 10**400), "was reported as an int, which is not one number"),
        (("a", 1, ["split"]), "the tags of the metric 'a' are a list"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(paceline.UsageError, match=said):
        paceline.metrics.report(*arguments)


def test_sinks_that_are_none():
    with pytest.raises(paceline.UsageError, match="add_sink was given a str"):
        paceline.metrics.add_sink("print")  # type: ignore[arg-type]
    with pytest.raises(paceline.UsageError, match="was not added"):
        paceline.metrics.remove_sink(print)


def _report_often(name: str) -> None:
    for number in range(200):
        paceline.metrics.report(name, number)


def test_reports_of_several_threads_are_each_in_a_run_s_journal_once(tmp_path):
    with journal.Journal(tmp_path / "journal.jsonl") as file:
        append = journal.PatientJournal(file).append
        with metric_reports.journal_of(0, append):
            threads = [threading.Thread(target=_report_often, args=(f"{at}",)) for at in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    found = [(one.name, one.value) for one in journal.iterate(file.path) if isinstance(one, MetricReported)]
    assert sorted(found) == [(f"{at}", float(n)) for at in range(4) for n in range(200)]
