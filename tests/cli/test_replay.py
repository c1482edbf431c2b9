"""`paceline replay`: the script that made a run is run again up to its fit, and one shard compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.cli.made_runs import register_process_engine, write_run

from paceline.cli import main
from paceline.cli.replay import replay
from paceline.core import events, journal
from paceline.core.journal import Journal
from paceline.frontends import overrides, recomputation
from paceline.train.state.run_folder import RunFolder

SCRIPT = """
import sys
import paceline, torch
from torch import nn

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def fit(seed, run_dir):
    config = paceline.TrainConfig(
        workers=2, shards=4, global_batch=20, epochs=3, seed=seed, audit_every=2, progress=False,
        run_dir=run_dir, checkpoint=paceline.CheckpointConfig(every_epochs=1),
    )
    adam = lambda p: torch.optim.Adam(p, 0.01)
    return paceline.Trainer(net, nn.MSELoss(), optimizer=adam, config=config).fit((x, x.sum(1, keepdim=True)))


if __name__ == "__main__":
    *others, seed = map(int, sys.argv[1].split(","))
    for other in others:
        fit(other, f"other-{other}")
    print(fit(seed, "run").state_hash)
"""

app = typer.Typer(rich_markup_mode=None)
app.callback()(lambda: None)
app.command("replay")(replay)


def paceline(*args: object) -> int:
    return main.invoke(app, ["replay", *map(str, args)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of nine steps on two workers; every second one is audited."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "5"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_recorded_script_is_run_and_the_bits_agree(run, capsys):
    before = sorted(path.name for path in run.parent.iterdir())
    assert paceline(run, "--step", 8, "--shard", 3) == 0
    out = capsys.readouterr().out
    assert f"script      {run.parent / 'script.py'} 5" in out
    assert "on rank 1" in out
    assert out.endswith("step 8, shard 3: the same bits\n")
    assert sorted(path.name for path in run.parent.iterdir()) == before


def test_a_run_on_an_engine_is_computed_again_here(tmp_path, capsys, monkeypatch):
    """Also one whose folder names the engine: older versions recorded it."""
    register_process_engine(monkeypatch, tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT.replace("workers=2, ", ""))
    assert main.invoke(main.app, ["train", "script.py", "--engine", "process", "--nodes", "2", "5"]) == 0
    record = json.loads(Path("run/command.json").read_text())
    assert record["settings"] == ["workers=2"]
    older = {**record, "settings": ["engine=Process(name='process', nodes=2)", *record["settings"]]}
    del older["tag"]
    for text in (json.dumps(record), json.dumps(recomputation.signed(older))):
        Path("run/command.json").write_text(text)
        assert paceline("run", "--step", 4, "--shard", 3) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.endswith("step 4, shard 3: the same bits\n")


def test_a_file_that_names_the_engine_is_recorded_without_it(tmp_path):
    secret = '{name = "ray", runtime_env = {env_vars = {HF_TOKEN = "hf_1"}}}'
    command = overrides.Command("/s.py", (), "/", ("seed=3", f"engine={secret}", "workers=2"))
    folder = write_run(tmp_path / "run", [])
    with overrides.in_force(overrides.Overrides(command=command)):
        recomputation.record_command(RunFolder(folder))
    found, own = recomputation.recorded_command(folder)
    assert own
    assert found is not None
    assert found.settings == ("seed=3", "workers=2")


def test_json(run, capsys):
    assert paceline(run, "--step", 2, "--shard", 0, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["same"] is True
    assert facts["hash"] == facts["recorded"]
    assert len(facts["samples"]) == 5
    assert facts["strayed"] is None


def test_a_step_without_a_hash(run, capsys):
    assert paceline(run, "--step", 3, "--shard", 1) == 0
    assert "recorded    none: step 3 was not audited" in capsys.readouterr().out


def test_a_fit_of_another_run_is_passed_over(run, capsys):
    assert paceline(run, "--step", 4, "--shard", 2, "--", "7,5") == 0
    assert "the same bits" in capsys.readouterr().out
    assert not (run.parent / "other-7").exists()


def test_other_settings_are_named(run, capsys):
    assert paceline(run, "--step", 4, "--shard", 2, "--", "7") == 2
    assert "these are the settings of another run: seed: 5 -> 7" in capsys.readouterr().err


def test_a_script_that_does_not_train(run, tmp_path, capsys):
    (tmp_path / "nothing.py").write_text("print('hello')")
    assert paceline(run, "--step", 4, "--shard", 2, "--script", tmp_path / "nothing.py") == 2
    assert "ended without Trainer.fit" in capsys.readouterr().err


def test_a_script_that_raises_or_exits_before_it_trains(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a name that is given is looked for here, not where the run was started
    Path("raises.py").write_text("def inner():\n    raise KeyError('no such column')\ninner()\n")
    assert paceline(run, "--step", 4, "--shard", 2, "--script", "raises.py") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'raises.py'} raised:\n\nTraceback")
    assert "KeyError: 'no such column'" in said
    assert "/paceline/" not in said
    assert "unexpected" not in said
    Path("exits.py").write_text("import sys\nsys.exit(3)\n")
    assert paceline(run, "--step", 4, "--shard", 2, "--script", "exits.py") == 2
    assert "exits.py called sys.exit(3) before Trainer.fit" in capsys.readouterr().err


def test_a_run_by_its_name_and_the_newest_run(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(run)
    for named in (["mine"], []):
        assert paceline(*named, "--step", 4, "--shard", 2, "--script", run.parent / "script.py") == 0
        assert "step 4, shard 2: the same bits" in capsys.readouterr().out


def test_a_changed_script_has_other_bits(run, tmp_path, capsys):
    changed = tmp_path / "changed.py"
    changed.write_text(SCRIPT.replace("x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + 1"))
    assert paceline(run, "--step", 6, "--shard", 2, "--script", changed) == 1
    out = capsys.readouterr().out
    assert "from checkpoint 1, then 2 steps again" in out
    assert "from step 4 on the loss is not the journal's" in out
    assert out.endswith("step 6, shard 2: OTHER BITS\n")


def test_what_is_not_in_the_run(run, capsys):
    assert paceline(run, "--step", 10, "--shard", 0) == 2
    assert "its journal has steps 1 to 9" in capsys.readouterr().err
    assert paceline(run, "--shard", 0) == 2
    assert "--step" in capsys.readouterr().err


def test_a_run_whose_script_is_not_known(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", "journal.jsonl"):
        (copy / name).write_bytes((run / name).read_bytes())
    assert paceline(copy, "--step", 2, "--shard", 0) == 2
    assert "does not say which script made it" in capsys.readouterr().err
    script = run.parent / "script.py"
    assert paceline(copy, "--step", 2, "--shard", 0, "--script", script, "--", "5") == 0
    (copy / "command.json").write_text("{}")
    assert paceline(copy, "--step", 2, "--shard", 0) == 2
    assert "does not say what made the run" in capsys.readouterr().err


def test_a_hash_that_a_worker_got_wrong(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", "command.json"):
        (copy / name).write_bytes((run / name).read_bytes())
    with Journal(copy / "journal.jsonl") as file:
        for event in journal.iterate(run / "journal.jsonl"):
            if isinstance(event, events.ShardHashed) and (event.step, event.shard) == (6, 1):
                event = events.ShardHashed(time=0.0, step=6, shard=1, rank=1, hash="0" * 32)
            file.append(event)
    assert paceline(copy, "--step", 6, "--shard", 1) == 1
    assert "OTHER BITS" in capsys.readouterr().out
