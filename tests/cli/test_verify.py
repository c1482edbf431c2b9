"""`paceline verify`: a run is computed again in one process, and the first number that differs is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.checkpoint.store import CheckpointStore
from paceline.cli import main
from paceline.cli.verify import verify
from paceline.core import events, journal
from paceline.core.journal import Journal

STEPS = 12

SCRIPT = """
import os, sys
import paceline, torch
from torch import nn

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


class Wrong(paceline.Modifier):
    # What a broken machine does to all ranks alike: no comparison of theirs can see it.
    seen = 0

    def change_gradients(self, parameters):
        self.seen += 1
        if self.seen == 5 and os.path.exists("broken"):
            next(iter(parameters.values())).grad.view(-1)[0] += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


if __name__ == "__main__":
    config = paceline.TrainConfig(
        workers=2, shards=4, global_batch=20, epochs=4, audit_every=4, progress=False, run_dir="run",
        checkpoint=paceline.CheckpointConfig(every_steps=3, keep_last=3),
    )
    adam = lambda p: torch.optim.Adam(p, 0.01)
    trainer = paceline.Trainer(net, nn.MSELoss(), optimizer=adam, config=config, callbacks=[Wrong()])
    trainer.fit((x, x.sum(1, keepdim=True)))
"""

app = typer.Typer(rich_markup_mode=None)
app.callback()(lambda: None)
app.command("verify")(verify)


def paceline(*args: object) -> int:
    return main.invoke(app, ["verify", *map(str, args)])


def made(folder: Path) -> Path:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def rewritten(run: Path, step: int, **changes: Any) -> None:
    """The journal says something else about one step."""
    lines = [
        dataclasses.replace(event, **changes)
        if isinstance(event, events.StepCommitted) and event.step == step
        else event
        for event in journal.iterate(run / "journal.jsonl")
    ]
    (run / "journal.jsonl").unlink()
    written = Journal(run / "journal.jsonl")
    for event in lines:
        written.append(event)
    written.close()


def test_all_steps_from_the_beginning_to_the_end(run, capsys):
    before = sorted(run.rglob("*"))
    assert paceline(run) == 0
    out = capsys.readouterr().out
    assert "computed    steps 1 to 12 from the beginning" in out
    kept = {one.info.step for one in CheckpointStore(str(run / "checkpoints")).manifests()}
    for evidence in ("12 of sample", "12 of loss", "3 of hash", f"{len(kept)} of checkpoint", "1 of end"):
        assert evidence in out
    assert out.endswith("all 12 steps: the same bits\n")
    assert sorted(run.rglob("*")) == before


def test_some_steps_from_the_kept_checkpoints(run, capsys):
    assert paceline(run, "--steps", "sample=6", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["same"] is True
    assert facts["complete"] is False
    assert facts["steps"] == 6
    versions = {one.info.step: one.version for one in CheckpointStore(str(run / "checkpoints")).manifests()}
    starts = [(one["version"], one["first"]) for one in facts["intervals"]]
    kept = [step for step in sorted(versions) if step < STEPS]
    assert starts == [(None, 1), *((versions[step], step + 1) for step in kept)]


def test_a_first_step_that_differs_asks_for_the_scripts_data(copied, capsys):
    rewritten(copied, 1, loss=0.25)
    assert paceline(copied) == 1
    out = capsys.readouterr().out
    assert "step 1: OTHER BITS" in out
    assert "does the script make the same data" in out


def test_one_step_is_one_step(run, capsys):
    assert paceline(run, "--steps", "sample=1") == 0
    assert "1 step: the same bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": 0.25},
            "step 7: OTHER BITS: its loss came out differently, in steps 1 to 12 from the beginning",
        ),
        ({"sample": "00"}, "step 7: OTHER BITS: the weights that it begins with came out differently"),
    ],
)
def test_the_first_step_that_differs_is_named(changes, words, copied, capsys):
    rewritten(copied, 7, **changes)
    assert paceline(copied) == 1
    assert words in capsys.readouterr().out


def test_a_script_that_raises_is_no_other_result(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text("raise KeyError('no such column')\n")
    assert paceline(run, "--script", "raises.py") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'raises.py'} raised:")
    assert "KeyError: 'no such column'" in said
    assert "unexpected" not in said


def test_a_run_by_its_name_and_the_newest_run(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(run)
    for named in (["mine"], []):
        assert paceline(*named, "--script", run.parent / "script.py") == 0
        assert "the same bits" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_not_needed_with_a_script(copied, run, capsys):
    (copied / "command.json").write_text("{")
    assert paceline(copied) == 2
    assert "give the script with --script" in capsys.readouterr().err
    assert paceline(copied, "--script", run.parent / "script.py") == 0
    assert "the same bits" in capsys.readouterr().out


def test_what_all_ranks_computed_wrongly_alike_is_found(tmp_path, capsys):
    """Their hashes agree, and so the audit is content: only computing it again shows it."""
    (tmp_path / "broken").touch()
    run = made(tmp_path)
    (tmp_path / "broken").unlink()
    assert paceline(run) == 1
    out = capsys.readouterr().out
    assert "step 6: OTHER BITS: the weights that it begins with came out differently" in out


def test_what_cannot_be_computed_again(run, tmp_path, copied, capsys):
    assert paceline(run, "--steps", "some") == 2
    assert "--steps all" in capsys.readouterr().err
    (copied / "command.json").unlink()
    assert paceline(copied) == 2
    assert "paceline verify RUN" in capsys.readouterr().err
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.replace("epochs=4", "epochs=4, seed=9"))
    assert paceline(run, "--script", other) == 2
    assert "these are the settings of another run: seed" in capsys.readouterr().err
