"""`paceline tune` and `paceline tune show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import paceline

params = paceline.tune.params({"lr": 0.5})
for step in range(2):
    paceline.tune.report(step, -abs(params["lr"] - 0.1) * (step + 1))
print("arguments", sys.argv[1:])
if params["lr"] > 0.6:
    raise ValueError("too fast")
"""
SPACE = 'lr = { uniform = [0.0, 1.0] }\nkind = ["a", "b"]\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a script, a space and a finished study."""
    folder: Path = tmp_path_factory.mktemp("tune")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "space.toml").write_text(SPACE)
    done = tune(folder, "train.py", "--samples", "8", "--parallel", "2", "--seed", "3", "--study", "s",
                "--sampler", "random", "--", "--kind", "{kind}", "{other}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "8/8 trial" in done.stderr
    assert "best: -" in done.stdout
    return folder


def tune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "tune", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )


def test_show(place):
    shown = tune(place, "show")
    assert shown.returncode == 0
    assert "studies/s: 8 trials over, 0 under way" in shown.stdout
    assert shown.stdout.count("complete") + shown.stdout.count("failed") == 8
    plain = json.loads(tune(place, "show", "s", "--json").stdout)
    assert len(plain["trials"]) == 8
    best = plain["best"]
    assert best["value"] == max(one["value"] for one in plain["trials"] if one["state"] == "complete")
    assert best["value"] == -abs(best["params"]["lr"] - 0.1) * 2
    output = place / "studies" / "s" / "trials" / f"{best['number']:04d}" / "output.log"
    assert f"arguments ['--kind', '{best['params']['kind']}', '{{other}}']" in output.read_text()
    one = tune(place, "show", "s", "--trial", "0").stdout
    assert "step 1:" in one
    assert "output.log" in one
    failed = [one["number"] for one in plain["trials"] if one["state"] == "failed"]
    assert failed, "the seed draws no trial that fails"
    assert "ValueError: too fast" in tune(place, "show", "s", "--trial", str(failed[0])).stdout


def test_a_picture(place):
    drawn = tune(place, "show", "s", "--plot", "pictures/s.svg")
    assert drawn.returncode == 0, drawn.stderr
    assert "wrote pictures/s.svg" in drawn.stderr
    assert (place / "pictures" / "s.svg").read_text().startswith("<?xml")


def test_resume(place):
    again = tune(place, "train.py", "--samples", "9", "--parallel", "1", "--seed", "3", "--study", "s",
                 "--sampler", "random", "--pruner", "median", "--resume", "--json", "--", "{kind}",
                 )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["trials"]) == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["missing.py"], "the script missing.py is not there"),
        (["train.py", "--space", "missing.toml"], "missing.toml cannot be read"),
        (["train.py", "--samples", "0"], "num_samples=0"),
        (["train.py", "--parallel", "0"], "num_gpus=0"),
        (["train.py", "--mode", "best"], "mode='best'"),
        (["train.py", "--sampler", "x"], "sampler is 'x'"),
        (["train.py", "--engine", "slurm"], "engine='slurm'"),
        (["train.py", "--address", "ray://head:10001"], "--engine ray"),
        (["train.py", "--resume"], "--resume does not say which study"),
        (["train.py", "--study", "s"], "there is a study in studies/s already"),
        (["show", "other"], "there is no study in studies/other"),
        (["show", "s", "--trial", "99"], "there is no trial 99"),
        (["show", "s", "--plot", "a.gif"], "the suffix '.gif' is not one of"),
        (["silent.py"], "silent.py reported nothing"),
        (["deaf.py"], "deaf.py did not read the parameters"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(place, words, said):
    (place / "silent.py").write_text("import paceline\npaceline.tune.params()\n")
    (place / "deaf.py").write_text("import paceline\npaceline.tune.report(0, 1.0)\n")
    done = tune(place, *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_no_study_at_all(tmp_path):
    done = tune(tmp_path, "show")
    assert done.returncode == 2
    assert "there is none below" in done.stderr
