"""Faults that need the whole machinery: the kernel's memory limit, a replacement that dies while it joins, a
worker that is stopped, and who is named for them."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.frontends.supervised_runs import behind_gate, check_exactly_once, of, supervised
from tests.train.small_run import data, fit, settings, trainer
from tests.waiting import wait_for

import paceline
from paceline.core import events, memory_cgroup


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return fit(settings(folder, 1, fault_tolerance=paceline.FaultTolerance(enabled=False))).state_hash


def blamed(folder: Path) -> list[tuple[int, str, str]]:
    return [(event.rank, event.phase, event.cause) for event in of(events.WorkerFailed, folder)]


class Held(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The small run's data, of which each process reads its first sample with a call that holds the
    interpreter's lock, as a large `json.loads` does."""

    def __init__(self, seconds: float) -> None:
        self.inputs, self.targets = data()
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        seconds, self.seconds = self.seconds, 0.0
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return self.inputs[index], self.targets[index]


def test_a_first_sample_that_holds_the_interpreters_lock_is_waited_for(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = trainer(supervised(folder)).fit(Held(4.0), data())
    assert history.state_hash == undisturbed
    assert blamed(folder) == []
    assert not of(events.Verdict, folder)


def is_first(mark: Path) -> bool:
    """Whether this is the first call, in any process."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        return True
    return False


class Flaky(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The small run's data, of which reading one sample fails once, or always."""

    def __init__(self, mark: Path, error: Exception, sample: int = 17, always: bool = False) -> None:
        self.inputs, self.targets = data()
        self.mark, self.error, self.sample, self.always = mark, error, sample, always

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.sample and (self.always or is_first(self.mark)):
            raise self.error
        return self.inputs[index], self.targets[index]


@pytest.mark.parametrize("kind", [OSError, EOFError, http.client.HTTPException])
def test_a_sample_that_cannot_be_read_once_is_forgiven_as_in_the_objective(tmp_path, undisturbed, kind):
    folder = tmp_path / "run"
    flaky = Flaky(tmp_path / "mark", kind("the server is busy"))
    history = trainer(supervised(folder)).fit(flaky, data())
    assert history.state_hash == undisturbed
    ((_, _, cause),) = blamed(folder)
    assert cause == "raised"
    assert "the server is busy" in of(events.WorkerFailed, folder)[0].reason
    check_exactly_once(folder)


def test_a_connection_that_is_reset_once_in_a_loader_process_is_forgiven(tmp_path, undisturbed):
    folder = tmp_path / "run"
    flaky = Flaky(tmp_path / "mark", ConnectionResetError("reset by peer"))
    loader = torch.utils.data.DataLoader(flaky, num_workers=1)
    history = trainer(supervised(folder, 2)).fit(loader, data())
    assert history.state_hash == undisturbed
    assert [cause for _, _, cause in blamed(folder)] == ["raised"]


def test_a_sample_that_can_never_be_read_is_tried_twice_and_ends_the_run(tmp_path):
    torn = Flaky(tmp_path / "mark", OSError("the file is torn"), always=True)
    with pytest.raises(paceline.PacelineError, match="the file is torn"):
        trainer(supervised(tmp_path / "run", 2)).fit(torn, data())
    assert [cause for _, _, cause in blamed(tmp_path / "run")] == ["raised", "raised"]


def test_a_mistake_in_the_datasets_code_is_not_tried_again(tmp_path):
    wrong = Flaky(tmp_path / "mark", KeyError("the name of a column"), always=True)
    with pytest.raises(paceline.UsageError, match="the name of a column"):
        trainer(supervised(tmp_path / "run", 2)).fit(wrong, data())
    assert [cause for _, _, cause in blamed(tmp_path / "run")] == ["raised"]


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_worker_lost_in_the_search_for_a_micro_batch_is_no_end(tmp_path, undisturbed, how, caplog):
    def objective(model, batch):
        if is_first(tmp_path / "mark"):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("once")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    folder = tmp_path / "run"
    history = fit(supervised(folder, 2, micro_batch="auto"), objective=objective)
    assert history.state_hash == undisturbed
    assert blamed(folder) == []
    assert 'the search for micro_batch="auto" begins again' in caplog.text


def groups_can_be_made() -> bool:
    with contextlib.suppress(OSError):
        memory_cgroup.make_cgroup_below(f"paceline-test-{os.getpid()}", 64 << 20).remove()
        return True
    return False


@pytest.mark.skipif(not groups_can_be_made(), reason="this user may not make memory groups")
def test_a_worker_that_the_kernel_kills_for_memory_is_named_as_such(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder, chaos="oom rank=1 step=5 phase=forward"))
    assert history.state_hash == undisturbed
    assert blamed(folder) == [(1, "forward", "memory")]
    assert "out of memory (cgroup limit 64 MiB)" in of(events.WorkerFailed, folder)[0].reason


def test_a_replacement_that_dies_while_it_joins_is_replaced(tmp_path, undisturbed):
    folder = tmp_path / "run"
    chaos = "kill rank=1 step=5 phase=forward; kill rank=1 phase=wait attempt=2"

    def until_the_replacement_is_lost() -> None:
        wait_for(lambda: len(blamed(folder)) == 2, "the replacement did not join, or was not killed")

    history = behind_gate(supervised(folder, chaos=chaos), tmp_path / "gate", until_the_replacement_is_lost)
    assert history.state_hash == undisturbed
    assert blamed(folder) == [(1, "forward", "crash"), (1, "wait", "crash")]
    check_exactly_once(folder)


def test_a_stopped_worker_is_named_in_failure_and_verdict(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder, chaos="stop rank=2 step=5 phase=data"))
    assert history.state_hash == undisturbed
    assert blamed(folder) == [(2, "data", "silent")]
    (verdict,) = of(events.Verdict, folder)
    assert (verdict.rank, verdict.phase) == (2, "data")
    assert "the process is stopped (SIGSTOP)" in verdict.text
