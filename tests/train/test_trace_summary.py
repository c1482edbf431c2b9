"""Traces of several ranks, joined by operator: nesting, totals over ranks, and files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UsageError
from paceline.train.history import History
from paceline.train.trace_summary import TraceSummary, clear_traces, phase_label, trace_name


def event(name: str, start: float, length: float, kind: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": length}


def write(folder: Path, rank: int, step: int, *events: dict[str, Any]) -> None:
    more = [{"ph": "M", "name": "process_name"}, event("cudaLaunchKernel", 0, 5, "cuda_runtime")]
    (folder / trace_name(rank, step)).write_text(json.dumps({"traceEvents": [*more, *events]}))


@pytest.fixture
def joined(tmp_path: Path) -> TraceSummary:
    write(
        tmp_path,
        0,
        2,
        event("aten::linear", 100, 1000),
        event("aten::addmm", 200, 600),
        event("aten::addmm", 900, 100),
        event("aten::add", 1100, 50),  # beside the first, not in it
        event("aten::addmm", 300, 100, thread=2),
        event(phase_label("forward"), 90, 1100, "user_annotation"),
    )
    write(tmp_path, 1, 2, event("aten::addmm", 0, 2000), event("gemm", 50, 700, "kernel"))
    write(tmp_path, 1, 9, event("aten::add", 0, 1))
    (tmp_path / "notes.json").write_text("not a trace")
    return TraceSummary(tmp_path)


def test_totals_over_ranks(joined: TraceSummary) -> None:
    totals = {one.name: one for one in joined.totals()}
    assert [one.name for one in joined.totals()][:2] == ["aten::addmm", "gemm"]
    addmm = totals["aten::addmm"]
    assert [addmm.calls, addmm.self_ms, addmm.total_ms] == pytest.approx([4, 2.8, 2.8])
    assert addmm.by_rank == {0: pytest.approx(0.8), 1: pytest.approx(2.0)}
    linear = totals["aten::linear"]
    assert [linear.self_ms, linear.total_ms] == pytest.approx([0.3, 1.0])
    assert totals["aten::add"].calls == 2
    forward = totals["phase: forward"]
    assert [forward.self_ms, forward.total_ms] == pytest.approx([0.05, 1.1])
    assert totals["gemm"].by_rank == {1: pytest.approx(0.7)}
    assert "cudaLaunchKernel" not in totals


def test_the_table(joined: TraceSummary) -> None:
    head, line, first, *rest = joined.table().splitlines()
    assert " ".join(head.split()) == "operator calls self ms share total ms rank 0 rank 1"
    assert set(line) == {"-", " "}
    assert first.split() == ["aten::addmm", "4", "2.800", "71.8%", "2.800", "0.800", "2.000"]
    assert rest[-1].startswith("3 traces of ranks 0 and 1: 3.901 ms in all")
    assert joined.table(rows=1, sort_by="total").splitlines()[2].startswith("aten::addmm")
    assert len(joined.table(rows=2).splitlines()) == 5
    with pytest.raises(UsageError, match="sort_by='name' is no order"):
        joined.table(sort_by="name")  # type: ignore[arg-type]


def test_a_new_run_clears_the_traces_and_nothing_else(joined: TraceSummary, tmp_path: Path) -> None:
    clear_traces(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.json"]
    clear_traces(tmp_path / "missing")
    with pytest.raises(UsageError, match="holds no trace of a worker"):
        joined.table()
    with pytest.raises(UsageError, match="holds no trace"):
        TraceSummary(tmp_path / "missing").table()


def test_a_damaged_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / trace_name(0, 2)).write_text("{")
    with pytest.raises(UsageError, match=r"rank-0.step-2.pt.trace.json is not a trace"):
        TraceSummary(tmp_path).table()


def test_a_history_knows_its_traces(joined: TraceSummary, tmp_path: Path) -> None:
    history = History(total_time=1.0, state_hash="0", profile_dir=str(tmp_path))
    assert History.from_dict(history.to_dict()).profile == joined
    with pytest.raises(UsageError, match="this run was not profiled") as info:
        _ = History(total_time=1.0, state_hash="0").profile
    assert "profile=DIR" in info.value.remedy
