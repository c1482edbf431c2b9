"""`paceline train`: the script runs as itself, settings from outside win, and exit codes pass through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline.core.available_resources import visible_gpus

SCRIPT = """
import json, sys
from paceline.frontends import overrides
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

config = overrides.current().apply(TrainConfig(workers=2, checkpoint=CheckpointConfig(metric="accuracy")))
print(json.dumps({
    "workers": config.workers, "epochs": config.epochs, "run_dir": config.run_dir, "resume": config.resume,
    "keep_last": config.checkpoint.keep_last, "metric": config.checkpoint.metric,
    "chaos": config.fault_tolerance.chaos, "min_workers": config.fault_tolerance.min_workers,
    "argv": sys.argv, "name": __name__, "command": overrides.command().to_plain(),
    "torch": "torch" in sys.modules,
}))
"""


def run(folder: Path, *args: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "paceline", "train", *args]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )


def test_settings_win_and_the_command_is_recorded(tmp_path):
    options = ["--workers", "3", "--epochs", "2", "--run-dir", "there", "--resume", "auto"]
    options += ["--chaos", "kill  rank=1", "--min-workers", "2", "--set", "checkpoint.keep_last=5"]
    done = run(tmp_path, "script.py", *options, "--", "--own", "x")
    assert done.stderr == ""
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "workers": 3,
        "epochs": 2,
        "run_dir": "there",
        "resume": "auto",
        "keep_last": 5,
        "metric": "accuracy",
        "chaos": "kill rank=1",
        "min_workers": 2,
        "argv": ["script.py", "--own", "x"],
        "name": "__main__",
        "command": {
            "script": str(tmp_path / "script.py"),
            "arguments": ["--own", "x"],
            "folder": str(tmp_path),
            "settings": [
                "workers=3",
                "epochs=2",
                "run_dir=there",
                "resume=auto",
                "fault_tolerance.chaos=kill rank=1",
                "fault_tolerance.min_workers=2",
                "checkpoint.keep_last=5",
            ],
        },
        "torch": False,
    }


def test_a_file_of_settings_wins_over_the_script_and_options_over_the_file(tmp_path):
    text = 'workers = 4\nepochs = 7\nresume = "auto"\n[checkpoint]\nkeep_last = 9\n'
    (tmp_path / "settings.toml").write_text(text)
    options = ["--config", "settings.toml", "--num-gpus", "3", "--set", "checkpoint.keep_last=5"]
    done = run(tmp_path, "--script", "script.py", *options, "x", "--", "--own")
    found = json.loads(done.stdout)
    assert (found["workers"], found["epochs"], found["resume"]) == (3, 7, "auto")
    assert (found["keep_last"], found["metric"]) == (5, "accuracy")
    assert found["argv"] == ["script.py", "x", "--own"]
    # As assignments, so that `paceline verify` repeats them whatever becomes of the file; the last counts.
    assert found["command"]["settings"] == [
        "workers=4", "epochs=7", 'resume="auto"', "checkpoint.keep_last=9",
        "workers=3", "checkpoint.keep_last=5",
    ]  # fmt: skip
    if visible_gpus() == 0:
        assert done.stderr == "paceline: no GPU here: num_gpus counts CPU workers, and there are 3\n"


def test_one_machine_and_the_own_engine_may_be_named(tmp_path):
    options = ["--num-nodes", "1", "--gpus-per-node", "2", "--num-gpus", "2", "--backend", "pytorch-ddp"]
    done = run(tmp_path, "script.py", *options)
    assert json.loads(done.stdout)["workers"] == 2


OF_FILE = """
import json
from paceline.frontends import overrides
from paceline.train.settings.train_config import TrainConfig

now = overrides.current()
config = now.apply(TrainConfig())
engine = config.engine
print(json.dumps({
    "workers": config.workers, "shards": config.shards, "global_batch": config.global_batch,
    "engine": engine and [engine.name, engine.nodes, getattr(engine, "share_nodes", None)],
    "per_gpu": now.per_gpu(),
}))
"""
UNDER_MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}  # fmt: skip


def of_file(folder: Path, settings: dict[str, object], *options: str) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(settings))
    done = run(folder, "script.py", "--config", "config.json", *options, script=OF_FILE)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("more", "options"),
    [({}, []), ({"num_gpus": 2}, []), ({"num_nodes": 2, "gpus_per_node": 3}, []), ({}, ["--engine", "mpi"])],
)
def test_counts_per_gpu_are_those_of_the_ranks_of_mpirun(tmp_path, monkeypatch, more, options):
    for name, value in UNDER_MPIRUN.items():
        monkeypatch.setenv(name, value)
    found = of_file(tmp_path, {"batch_size": 32, "epochs": 3, "learning_rate": 0.001, **more}, *options)
    assert (found["workers"], found["shards"], found["global_batch"]) == (4, 4, 128)
    assert found["engine"] == (["mpi", 4, None] if options else None)


RAY_FILE = {"backend": "ray", "num_gpus": 4, "batch_size": 8}


@pytest.mark.parametrize(
    ("options", "engine", "workers"),
    [
        ([], ["ray", 4, True], 4),
        (["--engine", "ray"], ["ray", 4, True], 4),
        (["--backend", "ray", "--num-gpus", "2"], ["ray", 2, True], 2),
        (["--nodes", "3"], ["ray", 3, False], 3),
        (["--engine", "slurm", "--nodes", "2"], ["slurm", 2, None], 2),
        (["--backend", "pytorch-ddp"], None, 4),
    ],
)
def test_a_file_with_backend_ray_is_engine_ray(tmp_path, options, engine, workers):
    found = of_file(tmp_path, RAY_FILE, *options)
    assert (found["engine"], found["workers"], found["global_batch"]) == (engine, workers, 8 * workers)
    assert found["per_gpu"] == ["num_gpus=4", "batch_size=8"]


def test_backend_ray_wins_over_the_framework_of_a_file(tmp_path):
    found = of_file(tmp_path, {**RAY_FILE, "backend": "horovod"}, "--backend", "ray", "--nodes", "2")
    assert (found["engine"], found["global_batch"]) == (["ray", 2, False], 16)
    assert found["per_gpu"] == ["num_gpus=4", "batch_size=8"]


def test_python_m_paceline_cli_is_the_program(tmp_path):
    for module in ("paceline", "paceline.cli"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
        assert done.stdout.startswith("paceline "), done.stderr


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["nowhere.py"], "the script nowhere.py cannot be read: No such file"),
        (["script.py", "--set", "wokers=3"], "did you mean workers?"),
        (["script.py", "--set", "workers"], "not of the form key=value"),
        (["script.py", "--set", "workers=many"], "expected int"),
        (["script.py", "--chaos", "kil rank=1"], "did you mean kill?"),
        (["script.py", "--workers", "0"], "workers=0"),
        (["script.py", "--own"], "No such option"),
    ],
)
def test_mistakes_are_one_message_and_code_2(tmp_path, args, shown):
    done = run(tmp_path, *args)
    assert done.returncode == 2
    assert shown in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(75)", 75, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise paceline.Stopped('SIGTERM', None)", 75, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise paceline.UsageError('not so', remedy='so')", 2, "error: not so\n  try: so\n"),
        ("raise paceline.ResourceError('full', remedy='more')", 1, "error: full\n  try: more\n"),
    ],
)
def test_exit_codes_pass_through(tmp_path, end, code, said):
    done = run(tmp_path, "script.py", script=f"import sys, paceline\n{end}\n")
    assert (done.returncode, done.stderr) == (code, said)


def test_a_mistake_of_the_script_is_shown_as_python_shows_it(tmp_path):
    script = "def inner():\n    return 1 / 0\ninner()\n"
    done = run(tmp_path, "script.py", script=script)
    assert done.returncode == 1
    plain = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == plain.stderr
    done = run(tmp_path, "script.py", script="def broken(:\n")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr


def test_settings_without_a_fit_are_told_to_have_no_effect(tmp_path):
    done = run(tmp_path, "script.py", "--workers", "2", script="print('hello')")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "ended without Trainer.fit" in done.stderr


TRAINING = """
import sys, torch, paceline

def objective(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
config = paceline.TrainConfig(workers=1, global_batch=8, max_steps=1_000_000, progress=False, run_dir="run")
trainer = paceline.Trainer(torch.nn.Linear(4, 1), objective, optimizer=lambda p: torch.optim.SGD(p, 1e-3),
                           config=config)
print("ready", flush=True)
history = trainer.fit(data)
print(len(history.steps))
"""


def test_a_real_script_trains_with_the_settings(tmp_path):
    done = run(
        tmp_path, "script.py", "--workers", "2", "--set", "max_steps=3", "--run-dir", "other", script=TRAINING
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["ready", "3"]
    assert (tmp_path / "other" / "journal.jsonl").exists()


def test_a_stopped_run_ends_with_75(tmp_path):
    (tmp_path / "script.py").write_text(TRAINING)
    command = [sys.executable, "-m", "paceline", "train", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        journal = tmp_path / "run" / "journal.jsonl"
        while not journal.exists() or "step_committed" not in journal.read_text():
            assert child.poll() is None
            os.sched_yield()
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
    assert child.returncode == 75
