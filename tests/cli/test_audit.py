"""`paceline audit`: a page for people, JSON for programs, exit code 1 where the proof fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.train.made_journals import MadeRun

from paceline.cli import main
from paceline.cli.audit import audit
from paceline.core import events
from paceline.core.journal import Journal
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder

app = typer.Typer(rich_markup_mode=None)
app.callback()(lambda: None)
app.command("audit")(audit)


def paceline(*args: object) -> int:
    return main.invoke(app, ["audit", *map(str, args)])


def written(path: Path, journal: list[events.Event]) -> Path:
    folder = RunFolder.create(TrainConfig(run_dir=str(path)).resolved(1))
    with Journal(folder.journal_file) as file:
        for event in journal:
            file.append(event)
    return folder.path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", MadeRun(5, trouble=0.4).run())


def test_a_proof_is_printed_with_its_counts(run, capsys):
    assert paceline(run) == 0
    out = capsys.readouterr().out
    assert "steps     28, each once" in out
    assert "epochs    4 complete" in out
    assert "samples   212 applied of a data set of 53" in out
    assert "Permutation(size=53, seed=3, epoch).take(offset, offset + taken); looked at one by one" in out
    assert "confirmed by receipt" in out
    assert out.endswith("run: each step was committed once, each sample applied once\n")


def test_json_has_everything(run, capsys):
    assert paceline(run, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["proved"] is True
    assert facts["steps"] == 28
    assert facts["receipts"]["by_receipt"] + facts["receipts"]["by_commit"] == 28 * 6
    assert facts["epochs"][0]["covered"] == 53
    assert facts["wrong"] == []


def test_what_is_wrong_is_listed(tmp_path, capsys):
    journal = MadeRun(5, trouble=0.0).run()
    left = [e for e in journal if not (isinstance(e, events.StepCommitted) and e.step in (9, 10))]
    assert paceline(written(tmp_path / "run", left)) == 1
    out = capsys.readouterr().out
    assert "wrong     steps 9 to 10 are missing" in out
    assert "not proved" in out


def test_a_torn_line_is_a_note(run, capsys):
    with open(run / "journal.jsonl", "ab") as file:
        file.write(b'{"type": "step_comm\n')
    assert paceline(run) == 0
    assert "note      1 damaged line of the journal could not be read" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert paceline(tmp_path / "nothing") == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    empty = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "empty")).resolved(1))
    assert paceline(empty.path) == 2
    assert "there is no journal" in capsys.readouterr().err


def test_it_needs_no_torch(run):
    code = (
        "import sys; from paceline.cli import audit; audit.audit(sys.argv[1]); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, check=False)
    assert done.returncode == 0
