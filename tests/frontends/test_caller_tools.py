"""A debugger or a profiler in the caller's process: it is found, and one worker computes where it watches."""

from __future__ import annotations

import bdb
import inspect
import os
import random
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.watched import debugged
from tests.train import small_run
from tests.train.small_run import STEPS_OF_EPOCH, adam, build, data, fit, trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import paceline
from paceline.core.errors import UsageError
from paceline.frontends import caller_tools, fit_drivers
from paceline.train.callbacks import Modifier, Observer
from paceline.train.state.model_state import state_hash

CPU = [ProfilerActivity.CPU]
STEPS = 2 * STEPS_OF_EPOCH


def settings(folder: Path, workers: int, **changes: Any) -> paceline.TrainConfig:
    return small_run.settings(folder, workers, **{"epochs": 2, **changes})


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit(settings(tmp_path_factory.mktemp("supervised") / "run", 1)).state_hash


class Pids(Observer):
    """Notes in which process steps are computed, and calls something after one of them."""

    def __init__(self, step: int = 0, act: Any = None) -> None:
        self.steps, self._step, self._act = 0, step, act

    def on_step(self, record: Any) -> None:
        self.steps += 1
        if record.step == self._step:
            self._act()


def test_none_is_found_where_none_is() -> None:
    assert caller_tools.watching_tool() is None


def test_a_profiler_is_found_also_while_its_schedule_waits() -> None:
    with profile(activities=CPU):
        assert caller_tools.watching_tool() == "a torch.profiler is active"
    with profile(activities=CPU, schedule=schedule(wait=1, warmup=1, active=1)):
        assert caller_tools.profiler_is_active()
    with torch.autograd.profiler.profile():
        assert caller_tools.profiler_is_active()
    assert not caller_tools.profiler_is_active()


def test_a_debugger_is_found_and_a_counter_of_lines_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with debugged():
        assert caller_tools.watching_tool() == "a debugger is active"
    assert not caller_tools.debugger_is_active()

    def count(*_: Any) -> None: ...

    for module, found in (("coverage.pytracer", False), ("trace", False), ("_pydevd_bundle.pydevd", True)):
        count.__module__ = module
        monkeypatch.setattr(sys, "gettrace", lambda: count)
        assert caller_tools.debugger_is_active() is found, module
    monkeypatch.undo()
    tools: Any = types.SimpleNamespace(DEBUGGER_ID=0, get_tool=lambda tool: "debugpy" if tool == 0 else None)
    monkeypatch.setattr(sys, "monitoring", tools, raising=False)
    assert caller_tools.debugger_is_active()


def test_a_debugger_without_a_breakpoint_runs_the_program() -> None:
    """As `python -m pdb -c continue script.py` does: it traces nothing until `breakpoint()` is called."""

    def program() -> tuple[Any, bool]:
        sys.settrace(None)
        return sys.gettrace(), caller_tools.debugger_is_active()

    assert bdb.Bdb().runcall(program) == (None, True)
    assert not caller_tools.debugger_is_active()


def test_only_one_worker_without_chaos_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with debugged():
        assert fit_drivers.tool_to_stay_for(settings(tmp_path, 1)) is not None
        assert fit_drivers.tool_to_stay_for(settings(tmp_path, 2)) is None
        chaos = paceline.FaultTolerance(chaos="kill rank=0 step=3")
        assert fit_drivers.tool_to_stay_for(settings(tmp_path, 1, fault_tolerance=chaos)) is None
    assert not caplog.records
    with profile(activities=CPU):
        assert fit_drivers.tool_to_stay_for(settings(tmp_path, 2)) is None
    assert "sees nothing of the workers: fit(profile=DIR)" in caplog.text


def test_a_profiler_sees_the_kernels_and_the_bits_are_the_same(tmp_path: Path, supervised: str) -> None:
    with profile(activities=CPU) as prof:
        history = fit(settings(tmp_path / "run", 1))
    shown = {one.key: one.count for one in prof.key_averages()}
    assert shown["aten::addmm"] >= STEPS
    assert shown["aten::native_batch_norm_backward"] >= STEPS
    assert history.state_hash == supervised
    assert (history.workers, len(history.steps)) == (1, STEPS)


def test_an_observer_can_step_a_schedule(tmp_path: Path, supervised: str) -> None:
    with profile(activities=CPU, schedule=schedule(wait=2, warmup=1, active=2, repeat=1)) as prof:

        class Steps(Observer):
            def on_step(self, record: Any) -> None:
                prof.step()

        history = fit(settings(tmp_path / "run", 1), [Steps()])
    assert 2 <= {one.key: one.count for one in prof.key_averages()}["Optimizer.step#Adam.step"] <= 3
    assert history.state_hash == supervised


class Stops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: Any) -> Any:
        output = self.inner(x)
        return output * 1.0


def test_a_breakpoint_in_the_model_stops(tmp_path: Path) -> None:
    seen: list[tuple[int, Any]] = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            if frame.f_code.co_name == "forward":
                seen.append((os.getpid(), frame.f_locals["output"].shape))
            self.set_continue()

    debugger = Debugger()
    assert debugger.set_break(__file__, Stops.forward.__code__.co_firstlineno + 2) is None
    config = settings(tmp_path / "run", 1, max_steps=3, epochs=None)
    debugger.set_trace(inspect.currentframe())
    try:
        trainer(config, model=Stops()).fit(data())
    finally:
        debugger.set_quit()
        sys.settrace(None)
        debugger.clear_all_breaks()
    assert len(seen) == 12, "3 steps of 4 shards"
    assert {pid for pid, _ in seen} == {os.getpid()}


def test_the_caller_is_left_as_it_was(tmp_path: Path) -> None:
    """As with workers of their own: the module changes when the run has come to its end, and only it."""

    class Remembers(Modifier):
        def __init__(self) -> None:
            self.calls = 0

        def change_gradients(self, parameters: Any) -> None:
            self.calls += 1

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    module, modifier, watching = build().eval(), Remembers(), Pids()
    optimizer = adam(module.parameters())
    before = state_hash(module)
    generators, threads = (torch.get_rng_state(), random.getstate()), torch.get_num_threads()

    def raises(model: nn.Module, batch: Any) -> Any:
        assert paceline.is_initialized(), "as in a worker, collectives find the group of this run"
        if watching.steps == 6:
            raise ZeroDivisionError("of the user's")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def make(folder: str, objective: Any) -> paceline.Trainer:
        return paceline.Trainer(
            module,
            objective,
            optimizer=optimizer,
            config=settings(tmp_path / folder, 1),
            callbacks=[watching, modifier],
        )

    with debugged(), pytest.raises(ZeroDivisionError, match="of the user's") as info:
        make("raises", raises).fit(data())
    assert any("of step 6 is saved: start again" in note for note in info.value.__notes__), (
        info.value.__notes__
    )
    assert state_hash(module) == before
    assert not paceline.is_initialized()
    with debugged():
        history = make("whole", nn.CrossEntropyLoss()).fit(data())
    assert state_hash(module) == history.state_hash != before
    assert not module.training
    assert modifier.calls == 0
    assert watching.steps == 6 + STEPS
    assert not optimizer.state
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert threads == torch.get_num_threads()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_continues(tmp_path: Path, supervised: str, number: int) -> None:
    asks = Pids(7, lambda: os.kill(os.getpid(), number))
    folder = tmp_path / "run"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        expected = KeyboardInterrupt if number == signal.SIGINT else paceline.Stopped
        with debugged(), pytest.raises(expected) as info:
            fit(settings(folder, 1), [asks])
    finally:
        signal.signal(signal.SIGINT, handler)
    stopped: Any = info.value
    assert 7 <= len(stopped.history.steps) <= 8
    with debugged():
        assert fit(settings(folder, 1, resume="auto")).state_hash == supervised


def test_two_profilers_of_one_process_are_refused(tmp_path: Path) -> None:
    with profile(activities=CPU), pytest.raises(UsageError, match=r"a torch.profiler is active already"):
        trainer(settings(tmp_path / "run", 1)).fit(data(), profile=tmp_path / "traces")


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    module: Any = build()
    module.kept = torch.ones(2, requires_grad=True) * 2  # torch copies no tensor that was computed
    with debugged(), pytest.raises(UsageError, match="cannot be copied"):
        trainer(settings(tmp_path / "run", 1), model=module).fit(data())


def test_each_worker_writes_a_trace(tmp_path: Path, supervised: str) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "rank-9.step-2.pt.trace.json").write_text("of an earlier run")
    history = trainer(settings(tmp_path / "run", 2)).fit(data(), data(), profile=traces)
    assert history.state_hash == supervised
    assert [file.name for file in history.profile.traces] == [
        "rank-0.step-2.pt.trace.json",
        "rank-1.step-2.pt.trace.json",
    ]
    totals = {one.name: one for one in history.profile.totals()}
    # 3 steps of 4 shards, 2 linear layers each, on both ranks together.
    assert totals["aten::addmm"].calls == 24
    assert set(totals["aten::addmm"].by_rank) == {0, 1}
    assert totals["phase: collective"].calls >= 6
    assert totals["Optimizer.step#Adam.step"].calls == 6
    assert "aten::addmm" in history.profile.table(rows=50)
    assert paceline.History.from_dict(history.to_dict()).profile == history.profile


def test_a_worker_that_is_killed_while_it_records(tmp_path: Path, supervised: str) -> None:
    care = paceline.FaultTolerance(chaos="kill rank=1 step=3 phase=backward")
    config = settings(tmp_path / "run", 2, fault_tolerance=care, profile=tmp_path / "traces")
    history = trainer(config).fit(data(), data())
    assert history.state_hash == supervised
    found = {file.name.partition(".")[0] for file in history.profile.traces}
    assert "rank-0" in found
    assert "phase: forward" in history.profile.table(rows=200)


def test_a_trace_of_the_steps_that_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short: dict[str, Any] = {"max_steps": 3, "epochs": None, "profile_steps": 9}
    with debugged():
        history = fit(settings(tmp_path / "run", 1, profile=tmp_path / "traces", **short))
    totals = {one.name: one for one in history.profile.totals()}
    assert totals["Optimizer.step#Adam.step"].calls == 2, "the first step is not recorded"
    assert not caller_tools.profiler_is_active()
    (tmp_path / "file").touch()
    with debugged():  # a trace that cannot be written ends no run
        unwritten = fit(settings(tmp_path / "other", 1, profile=tmp_path / "file" / "x", **short))
    assert "the trace of this worker cannot be written" in caplog.text
    assert unwritten.state_hash == history.state_hash
