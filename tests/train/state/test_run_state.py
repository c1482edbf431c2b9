"""The hash of a state, and taking a run up again only where it is the same run."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import Outcome, job, mlp, regression, train
from torch import nn

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.core.events import StepCommitted
from paceline.core.journal import read
from paceline.testing.thread_transport import run_ranks
from paceline.train import host_fingerprint
from paceline.train.callbacks import Observer, RunInfo
from paceline.train.loop import process_setup
from paceline.train.loop.run_builder import RunBuilder
from paceline.train.loop.worker_jobs import build, new_team
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.state.duty_progress import Duty
from paceline.train.state.model_state import load_model, model_tensors, state_hash
from paceline.train.stop_signals import StopRequest

DATA = regression(29)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(2, 3)
        self.a = nn.Parameter(torch.randn(2, 2, dtype=torch.float64).t())
        self.c = nn.Parameter(torch.randn(3).bfloat16())
        self.d = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.again = self.b.weight
        self.register_buffer("counter", torch.tensor(7))
        self.register_buffer("hidden", torch.tensor([True, False]), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("image", torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last))


def by_the_book(module: nn.Module) -> str:
    """From the docstring of `state_hash`, element by element."""
    names: dict[str, Any] = dict(module.named_parameters()) | dict(module.named_buffers())
    text = b""
    for name in sorted(names):
        tensor = names[name].detach()
        text += name.encode("utf-8") + b"\0"
        text += str(tensor.dtype).split(".")[1].encode() + b"\0"
        text += ",".join(map(str, tensor.shape)).encode() + b"\0"
        for element in tensor.flatten():
            if tensor.dtype == torch.bfloat16:
                element = element.view(torch.int16)
            text += element.numpy().tobytes()
    return hashlib.sha256(text).hexdigest()


def test_the_hash_is_what_its_description_says() -> None:
    module = Everything()
    assert state_hash(module) == by_the_book(module)
    before = state_hash(module)
    with torch.no_grad():
        module.b.bias[1] = -module.b.bias[1]
    assert state_hash(module) != before
    with torch.no_grad():
        module.b.bias.zero_()
    positive = state_hash(module)
    with torch.no_grad():
        module.b.bias.neg_()
    assert state_hash(module) != positive, "a negative zero has other bits"


def test_the_history_has_the_hash_of_the_weights() -> None:
    outcome = train(job(mlp(), DATA, epochs=1), 2)
    assert {state_hash(module) for module in outcome.modules} == {outcome.hash}
    assert outcome.hash == by_the_book(outcome.module)


def test_a_model_with_other_names_or_shapes_is_refused() -> None:
    saved = {f"model/{name}": tensor for name, tensor in model_tensors(mlp()).items()}
    with pytest.raises(UsageError, match=r"2.weight is torch.float32 \(3, 8\) in the model and .* \(2, 8\)"):
        load_model(mlp(outputs=3), saved)
    with pytest.raises(UsageError, match=r"2.bias \(only in the checkpoint\)"):
        load_model(nn.Sequential(nn.Linear(5, 8)), saved)


# resuming


class FirstStep(Observer):
    def __init__(self, found: list[int]) -> None:
        self.found = found

    def on_start(self, run: RunInfo) -> None:
        self.found.append(run.first_step)


def first_part(tmp_path: Path, **given: Any) -> None:
    train(job(mlp(), DATA, max_steps=2, run_dir=tmp_path / "run", **given))


def second_part(tmp_path: Path, data: Any = DATA, model: nn.Module | None = None, **given: Any) -> Outcome:
    given = {"max_steps": 4, **given}
    return train(job(model or mlp(), data, run_dir=tmp_path / "run", resume="auto", **given), 2)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    first_part(tmp_path)
    started: list[int] = []
    resumed = second_part(tmp_path, callbacks=[FirstStep(started)])
    assert started == [2]
    assert resumed.history.steps[-1].step == 4
    assert resumed.hash == train(job(mlp(), DATA, max_steps=4)).hash


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"global_batch": 6}, "global_batch: 12 -> 6"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"shards": 3}, "shards: 6 -> 3"),
        ({"clip_norm": 1.0, "shuffle": False}, "clip_norm: None -> 1.0; shuffle: True -> False"),
        ({"precision": "bf16"}, "precision: fp32 -> bf16"),
        ({"micro_batch": 1}, "micro_batch: None -> 1"),
        ({"drop_last": True}, "drop_last: False -> True"),
    ],
)
def test_another_definition_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    first_part(tmp_path)
    with pytest.raises(ConfigError, match=f"belongs to another run than this one: {named}"):
        second_part(tmp_path, **change)


def test_what_does_not_define_a_run_may_change(tmp_path: Path) -> None:
    first_part(tmp_path)
    changed = second_part(tmp_path, log_every=7, audit_every=1, checkpoint=CheckpointConfig(keep_last=1))
    assert changed.hash == train(job(mlp(), DATA, max_steps=4)).hash


def test_other_data_is_refused(tmp_path: Path) -> None:
    first_part(tmp_path)
    with pytest.raises(ConfigError, match="samples: 29 -> 30"):
        second_part(tmp_path, regression(30))


def test_another_model_is_refused(tmp_path: Path) -> None:
    first_part(tmp_path)
    with pytest.raises(UsageError, match="in the model and"):
        second_part(tmp_path, model=mlp(hidden=9))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    first_part(tmp_path)
    with pytest.raises(UsageError, match=r"written with \['SGD'\], this run has \['Adam'\]"):
        second_part(tmp_path, optimizer=lambda p: torch.optim.Adam(p, 0.1))


def test_changed_settings_of_an_optimizer_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_part(tmp_path)
    caplog.clear()
    resumed = second_part(tmp_path, optimizer=lambda p: torch.optim.SGD(p, 0.7, momentum=0.5))
    assert "settings of SGD that it had: momentum=0.9 (here 0.5), lr=0.1 (here 0.7)" in caplog.text
    assert resumed.hash == train(job(mlp(), DATA, max_steps=4)).hash
    caplog.clear()
    second_part(tmp_path)
    assert "settings of SGD" not in caplog.text


def groups(first: int) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": parameters[:first]}, {"params": parameters[first:], "lr": 0.5}], 0.1
        )

    return make


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    first_part(tmp_path, optimizer=groups(1))
    with pytest.raises(UsageError, match=r"other parameters in its groups: 0.bias"):
        second_part(tmp_path, optimizer=groups(2))
    with pytest.raises(UsageError, match="2 parameter groups, and 1 in this run"):
        second_part(tmp_path, optimizer=lambda p: torch.optim.SGD(p, 0.1))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.NAdam(p, 0.01),
        lambda p: torch.optim.ASGD(p, 0.01),
        lambda p: torch.optim.Adafactor(p, 0.01),
        lambda p: torch.optim.Adam(p, torch.tensor(0.01), amsgrad=True),
        lambda p: torch.optim.SGD(p, 0.01),
        lambda p: torch.optim.Rprop(p, 0.01),
    ],
    ids=["NAdam", "ASGD", "Adafactor", "Adam", "SGD", "Rprop"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_optimizer_state_comes_back_bit_for_bit(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Though torch would cast it to the dtype of the parameter."""
    data = (DATA[0].to(dtype), DATA[1].to(dtype))
    train(job(mlp().to(dtype), data, max_steps=2, run_dir=tmp_path / "run", optimizer=make))
    resumed = second_part(tmp_path, data, mlp().to(dtype), optimizer=make)
    assert resumed.hash == train(job(mlp().to(dtype), data, max_steps=4, optimizer=make)).hash


class Phases(nn.Module):
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([[0.3 + 0.1j, 0.2j]], dtype=torch.complex128))
        self.register_buffer("last", torch.zeros(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.last * 0.5 + self.phase[0].detach()
        return (x[:, :1] * self.phase).abs().float()


def test_numbers_that_the_file_format_does_not_know(tmp_path: Path) -> None:
    given: dict[str, Any] = {"optimizer": lambda p: torch.optim.Adam(p, 0.01)}
    train(job(Phases(), DATA, max_steps=2, run_dir=tmp_path / "run", **given))
    resumed = second_part(tmp_path, model=Phases(), **given)
    assert resumed.hash == train(job(Phases(), DATA, max_steps=4, **given)).hash


# state transfer


@pytest.mark.parametrize("model", [Phases, mlp])
def test_a_rank_that_lacks_the_state_gets_all_of_it(model: Callable[[], nn.Module]) -> None:
    """Model, optimizer, position, records, and what is still due after the last step."""
    given = job(model(), DATA, max_steps=4, optimizer=lambda p: torch.optim.Adam(p, 0.01))

    def one(context: DistributedContext) -> tuple[Any, ...]:
        with ExitStack() as stack:
            built = build(dataclasses.replace(given, model=copy.deepcopy(given.model)), stack, 0)
            team = new_team(context, given.config)
            run = stack.enter_context(RunBuilder(team, built.spec, built.device, StopRequest())).run()
            if context.rank == 0:
                # As if it had been alone for three steps.
                team.install(DistributedContext.from_transport(single_rank()))
                run.state.rebind()
                for micro in run.microbatches():
                    if micro.step == 3:
                        break
                    run.backward(nn.functional.mse_loss(built.module(micro.x), micro.y))
                run.state.ended, run.state.loop_left = "for a reason", False
                run.state.agenda.add(Duty.EVALUATE)
                team.install(context)
                run.state.rebind()
            run.state.synchronize(0, [1])
            state = run.state
            return (
                state.hash(),
                state_hash(built.module),
                state.progress,
                state.position,
                state.ended,
                state.agenda.state_dict(),
                run.parts.recorder.state_dict()["sums"],
            )

    with process_setup.prepared(given.config):
        first, second = run_ranks(2, one, timeout=60)
    assert first == second
    assert first[2] == (3, 1, 2)  # an epoch of three steps has ended, with two duties
    assert first[1] != state_hash(given.model)  # type: ignore[arg-type]


# fingerprints


def test_fingerprints_that_differ_are_named() -> None:
    here = host_fingerprint.fingerprint(torch.device("cpu"), 2)
    assert here["threads"] == "2"
    host_fingerprint.check(here, dict(here), "rank 1")
    other = {**here, "threads": "3", "instructions": "NONE"}
    with pytest.raises(
        PlatformError, match=r"rank 1 would not .*instructions was .*, is NONE; threads was 2, is 3"
    ):
        host_fingerprint.check(here, other, "rank 1")


def test_a_run_of_other_threads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_part(tmp_path)
    real = host_fingerprint.fingerprint

    def foreign(device: torch.device, threads: int) -> dict[str, str]:
        return {**real(device, threads), "instructions": "FOREIGN"}

    monkeypatch.setattr(host_fingerprint, "fingerprint", foreign)
    with pytest.raises(
        PlatformError, match=r"would not compute the same bits as the run so far: instructions"
    ):
        second_part(tmp_path)
    fast: dict[str, Any] = {"mode": "fast", "workers": 1, "shards": 1}
    train(job(mlp(), DATA, max_steps=2, run_dir=tmp_path / "fast", **fast))
    monkeypatch.setattr(host_fingerprint, "fingerprint", real)
    resumed = train(job(mlp(), DATA, max_steps=3, run_dir=tmp_path / "fast", resume="auto", **fast))
    assert resumed.history.steps[-1].step == 3


def test_ranks_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = host_fingerprint.fingerprint

    def by_rank(device: torch.device, threads: int) -> dict[str, str]:
        return {**real(device, threads), "instructions": threading.current_thread().name}

    monkeypatch.setattr(host_fingerprint, "fingerprint", by_rank)
    with pytest.raises(PlatformError, match=r"rank 1 would not .* instructions was rank-0, is rank-1"):
        train(job(mlp(), DATA, max_steps=1), 2)


def test_the_audit_hashes_every_so_many_steps(tmp_path: Path) -> None:
    given = job(mlp(), DATA, max_steps=4, audit_every=2, run_dir=tmp_path / "run")
    outcome = train(given)
    assert given.folder is not None
    events = read(given.folder / "journal.jsonl").events
    hashes = [event.hash for event in events if isinstance(event, StepCommitted)]
    assert [digest is not None for digest in hashes] == [False, True, False, True]
    assert hashes[3] == outcome.hash
