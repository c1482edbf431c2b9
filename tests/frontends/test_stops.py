"""Signals that ask a run to stop: wherever they go, whenever they come, the result is that of a quiet run."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.train import small_run
from tests.train.small_run import EPOCHS, STEPS, UNATTENDED, Signals, fit, journal_of, settings, steps_of
from tests.waiting import PATIENCE, wait_for

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core import atomic_file, events
from paceline.core.errors import PeerLostError
from paceline.train.callbacks import Observer
from paceline.train.stop_signals import Stopped

SUPERVISED = paceline.FaultTolerance()


def named(value: object) -> str:
    return str(value) if not isinstance(value, paceline.FaultTolerance) else f"care={value.enabled}"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> str:
    """The hash of the undisturbed run."""
    return fit(settings(tmp_path_factory.mktemp("quiet") / "run", 1)).state_hash


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def stopped(config, callbacks=(), **parts) -> Stopped:
    with pytest.raises(Stopped) as caught:
        fit(config, callbacks, **parts)
    return caught.value


def ended(folder: Path) -> events.RunEnded:
    """The end of the run; only what the workers say about themselves may stand after it."""
    said = (events.StepsReceived, events.ShardHashed)
    *_, last = (event for event in journal_of(folder) if not isinstance(event, said))
    assert isinstance(last, events.RunEnded)
    return last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("to", "care"),
    [
        (("main",), SUPERVISED),
        (("main", 0, 1), SUPERVISED),
        # To one worker of a supervised run it means that this worker leaves: see test_supervised.py.
        ((0,), UNATTENDED),
        ((1,), UNATTENDED),
        (("main", 0, 1), UNATTENDED),
    ],
    ids=named,
)
def test_the_step_is_finished_and_saved_and_the_run_goes_on(folder, quiet, number, to, care):
    step = random.Random(f"{number} {to}").randint(1, STEPS - 5)
    how = stopped(settings(folder, 2, fault_tolerance=care), [Signals(folder, step, to, number)])
    assert how.code == paceline.STOPPED_EXIT_CODE == 75
    expected = {number.name, "a signal to another worker"}
    assert how.reason in expected
    assert how.history.stopped == how.reason
    at = ended(folder).step
    assert step <= at < STEPS
    assert steps_of(folder) == list(range(1, at + 1))
    assert CheckpointStore(folder / "checkpoints").open().manifest.info.step == at
    assert not (folder / "stop").exists()

    history = fit(settings(folder, random.Random(step).choice([1, 3, 4]), resume="auto"))
    assert history.state_hash == quiet
    assert steps_of(folder) == list(range(1, STEPS + 1))


class AtStart(Signals):
    """Signals the main process before the first step is done."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1, ("main",))
        self.sent = False

    def change_batch(self, batch):
        if not self.sent and small_run.first():
            self.sent = True
            self.send()
        return batch

    def stop(self, record) -> None:
        pass


@pytest.mark.parametrize("care", [SUPERVISED, UNATTENDED], ids=named)
def test_before_the_first_step(folder, quiet, care):
    stopped(settings(folder, 2, fault_tolerance=care), [AtStart(folder)])
    assert steps_of(folder) == [1]
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet


def build_and_signal_while_starting(main: int) -> torch.nn.Module:
    if os.getpid() != main:
        os.kill(main, signal.SIGTERM)
        wait_for(lambda: False)
    return small_run.build()


def test_before_any_worker_has_begun(folder, quiet):
    how = stopped(settings(folder, 1), model=partial(build_and_signal_while_starting, os.getpid()))
    assert (how.code, how.reason, how.history) == (paceline.STOPPED_EXIT_CODE, "SIGTERM", None)
    assert steps_of(folder) == []
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet


class SignalsWhileEvaluating:
    """An objective that signals its own process in the second evaluation."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.loss = torch.nn.CrossEntropyLoss()

    def __call__(self, model, batch):
        if not model.training and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(model(batch[0]), batch[1])


def test_while_evaluating(folder, quiet, tmp_path):
    config = settings(folder, 2, fault_tolerance=UNATTENDED)
    stopped(config, objective=SignalsWhileEvaluating(tmp_path / "mark"))
    assert ended(folder).step == small_run.STEPS_OF_EPOCH + 1
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


def build_and_signal_while_saving(main: int) -> torch.nn.Module:
    """The rank that commits is signalled in the middle of it."""
    done = os.getpid() == main

    def call(operation, /, *args, **kwargs):
        nonlocal done
        if operation.__name__ == "rename" and "manifest" in str(args) and not done:
            done = True
            os.kill(os.getpid(), signal.SIGTERM)
        return operation(*args, **kwargs)

    if not done:
        atomic_file.direct = call
    return small_run.build()


def test_while_saving(folder, quiet):
    config = settings(folder, 2, fault_tolerance=UNATTENDED)
    stopped(config, model=partial(build_and_signal_while_saving, os.getpid()))
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet
    assert CheckpointStore(folder / "checkpoints").verify() == []


class AtTheEnd(Observer):
    """Signals the main process when nothing is left to do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.main = folder, os.getpid()

    def on_end(self, history) -> None:
        os.kill(self.main, signal.SIGTERM)
        if os.getpid() != self.main:
            wait_for((self.folder / "stop").exists)


@pytest.mark.parametrize("care", [SUPERVISED, UNATTENDED], ids=named)
def test_a_signal_after_the_last_step_is_not_swallowed(folder, quiet, care):
    how = stopped(settings(folder, 2, fault_tolerance=care), [AtTheEnd(folder)])
    assert how.history.state_hash == quiet
    assert how.history.stopped is None
    assert ended(folder).reason == "finished"
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


@pytest.mark.parametrize(("to", "care"), [((1,), UNATTENDED), (("main",), SUPERVISED)], ids=named)
def test_with_a_signal_in_the_last_step_the_run_is_complete(folder, quiet, to, care):
    how = stopped(settings(folder, 2, fault_tolerance=care), [Signals(folder, STEPS, to)])
    assert how.history.state_hash == quiet
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


class AtExit(Observer):
    """Signals its own process when that is about to end."""

    def on_end(self, history) -> None:
        atexit.register(os.kill, os.getpid(), signal.SIGUSR1)


def test_a_worker_that_has_done_its_work_is_not_killed_by_a_signal(folder, quiet):
    assert fit(settings(folder, 2, fault_tolerance=UNATTENDED), [AtExit()]).state_hash == quiet


def test_handlers_are_as_before(folder):
    def own(number, frame):
        raise AssertionError("not meant for this one")

    before = {number: signal.signal(number, own) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        fit(settings(folder, 1, epochs=1))
        assert signal.getsignal(signal.SIGTERM) is own
        stopped(settings(folder, 1, resume="auto"), [Signals(folder, 7, ("main",))])
        assert signal.getsignal(signal.SIGTERM) is own
        with pytest.raises(paceline.RankFailedError):
            fit(settings(folder, 1, resume="auto"), objective=lambda model, batch: 1 / 0)
        assert [signal.getsignal(number) for number in before] == [own, own]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_in_another_thread(folder, quiet):
    """Only the main thread can have handlers; there the program's own stay, and workers can be signalled."""
    results: list[object] = []

    def work() -> None:
        try:
            fit(settings(folder, 2, fault_tolerance=UNATTENDED), [Signals(folder, 8, (1,))])
        except BaseException as error:
            results.append(error)
        results.append(fit(settings(folder, 3, resume="auto")).state_hash)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) is before
    error, digest = results
    assert isinstance(error, Stopped)
    assert digest == quiet


class SignalsTwice(Observer):
    """Asks the other rank to stop and to end at once, while that one waits for this one."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step(self, record) -> None:
        if record.step == self.step:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                os.kill(small_run.workers_of(self.folder)[1], number)
            wait_for(lambda: False)


def test_the_second_signal_ends_a_worker_that_waits_for_another(folder, quiet):
    with pytest.raises(PeerLostError, match=r"rank 1 \(pid \d+\) exited with code 1(38|43)"):
        fit(settings(folder, 2, fault_tolerance=UNATTENDED), [SignalsTwice(folder, 9)])
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


def own_loop(config, signal_at: int | None = None) -> paceline.train.history.History:
    model = small_run.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    loss = torch.nn.CrossEntropyLoss()
    with paceline.session(model, small_run.adam(model.parameters()), config) as run:
        for micro in run.microbatches(small_run.data()):
            if run.step == signal_at:
                signal_at = None
                os.kill(os.getpid(), signal.SIGUSR1)
            run.backward(loss(model(micro.x), micro.y))
    assert run.history is not None
    return run.history


def test_in_a_session(tmp_path):
    quiet = own_loop(settings(tmp_path / "quiet", 1)).state_hash
    folder = tmp_path / "run"
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Stopped) as caught:
        own_loop(settings(folder, 1), signal_at=12)
    assert caught.value.reason == "SIGUSR1"
    assert steps_of(folder) == list(range(1, 14))
    assert signal.getsignal(signal.SIGUSR1) is before
    assert own_loop(settings(folder, 1, resume="auto")).state_hash == quiet


def test_in_a_session_outside_of_the_loop(tmp_path):
    model = small_run.build()

    def signalled(folder: Path, *, loop: bool) -> None:
        config = settings(folder, 1, epochs=1)
        with paceline.session(model, small_run.adam(model.parameters()), config) as run:
            for micro in run.microbatches(small_run.data()) if loop else ():
                run.backward(model(micro.x).mean())
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as caught:
        signalled(tmp_path / "after", loop=True)
    assert len(caught.value.history.steps) == small_run.STEPS_OF_EPOCH
    with pytest.raises(Stopped) as caught:
        signalled(tmp_path / "before", loop=False)
    assert caught.value.history is None


def test_a_stop_that_is_left_over_is_not_obeyed(folder, quiet):
    stopped(settings(folder, 2, fault_tolerance=UNATTENDED), [Signals(folder, 3, (0,))])
    (folder / "stop").write_text("SIGTERM")  # by a process that was killed before it could take it away
    history = fit(settings(folder, 2, resume="auto", epochs=EPOCHS - 2, fault_tolerance=UNATTENDED))
    assert (history.epochs[-1].epoch, history.stopped) == (EPOCHS - 3, None)
    (folder / "stop").write_text("SIGTERM")
    history = fit(settings(folder, 2, resume="auto"))
    assert (history.state_hash, history.stopped) == (quiet, None)
    assert history.epochs[-1].epoch == EPOCHS - 1
