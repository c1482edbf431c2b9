"""`paceline checkpoint`: every command on a real run's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.future_versions import from_the_future
from tests.checkpoint.saving import save
from tests.cli.made_runs import write_run

from paceline.checkpoint.store import CheckpointStore
from paceline.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step, loss in ((10, 0.5), (20, 0.25), (30, 0.75)):
        save(store, step, loss=loss, parent=step // 10 - 1 or None)
    return tmp_path / "run"


def paceline(*args: object) -> int:
    return main.invoke(main.app, ["checkpoint", *map(str, args)])


def test_ls(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    CheckpointStore(run / "checkpoints").tag(2, "good")
    assert paceline("ls", run) == 0
    out = capsys.readouterr().out
    assert "loss 0.25" in out
    assert "good" in out
    assert paceline("ls", run / "checkpoints", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [item["version"] for item in listed] == [1, 2, 3]
    assert [item["parent"] for item in listed] == [None, 1, 2]
    assert listed[1]["tags"] == ["good"]
    assert listed[1]["metrics"] == {"loss": 0.25}


def test_a_run_by_its_name_and_the_newest_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(CheckpointStore(write_run(tmp_path / "runs" / "mine", []) / "checkpoints"), 10, loss=0.5)
    for command in ("ls", "show", "verify"):
        assert paceline(command) == 0
        newest = capsys.readouterr().out
        assert paceline(command, "mine") == 0
        assert capsys.readouterr().out == newest
    assert paceline("diff", "mine", 1, "latest") == 0
    assert paceline("tag", "mine", 1, "good") == 0
    assert paceline("export", "mine", "good", tmp_path / "model.pt") == 0


def test_ls_names_a_damaged_manifest(run, capsys):
    manifest = run / "checkpoints" / "v00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:50])
    assert paceline("ls", run, "--json") == 0
    captured = capsys.readouterr()
    assert [item["version"] for item in json.loads(captured.out)] == [1, 3]
    assert captured.err.startswith("damaged: v00000002/manifest.json is damaged or cut off")


def test_what_cannot_be_read_is_not_called_damaged(run, capsys):
    from_the_future(run / "checkpoints", 3)
    assert paceline("ls", run) == 0
    assert capsys.readouterr().err.startswith("unknown format: v00000003/manifest.json has the format")
    for version in (1, 2):
        from_the_future(run / "checkpoints", version)
    assert paceline("ls", run) == 1
    capsys.readouterr()
    assert paceline("verify", run) == 1
    assert "damaged" not in capsys.readouterr().out
    assert paceline("show", run, 3) == 1
    captured = capsys.readouterr().err
    assert "cannot be read here" in captured
    assert "damaged" not in captured


def test_a_url(capsys):
    store = CheckpointStore("memory://cli-test/run/checkpoints")
    save(store, 1)
    for url in (
        "memory://cli-test/run",
        "memory://cli-test/run/checkpoints",
        "memory://cli-test/run/checkpoints/",
    ):
        assert paceline("verify", url) == 0
        assert capsys.readouterr().out == "1 checkpoint: every file is as it was written\n"


def test_show(run, capsys):
    assert paceline("show", run, "best") == 0
    out = capsys.readouterr().out
    assert "version: 2" in out
    assert "model/weight  float32[7, 5]" in out
    assert "xxh3_128" in out
    assert paceline("show", run, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == 3
    assert facts["tensors"]["model/bias"] == "bfloat16[5]"
    assert facts["state"] == ["loss", "position", "scale", "step"]


def test_verify(run, capsys):
    assert paceline("verify", run) == 0
    assert paceline("verify", run, "latest") == 0
    assert "checkpoint 3: every file" in capsys.readouterr().out
    state = run / "checkpoints" / "v00000002" / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    assert paceline("verify", run) == 1
    assert "damaged: v00000002/state.json is cut off" in capsys.readouterr().out
    assert paceline("verify", run, 3) == 0
    assert paceline("verify", run, 2) == 1
    assert paceline("show", run, 2) == 1
    assert "error: checkpoint 2 in" in capsys.readouterr().err


def test_diff(run, capsys):
    assert paceline("diff", run, 1, "latest") == 0
    out = capsys.readouterr().out
    assert "~ model/weight  float32[7, 5]: 35 elements differ" in out
    assert "~ state['step']: 10 -> 30" in out
    assert "1 -> 3: 0 tensors are the same bits" in out
    assert paceline("diff", run, 2, 2) == 0
    assert capsys.readouterr().out == "2 -> 2: no difference\n"
    assert paceline("diff", run, 1, 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["changed"][0]["name"] == "model/bias"


def test_tag(run, capsys):
    assert paceline("tag", run, "best", "good") == 0
    assert capsys.readouterr().out == "checkpoint 2 is now good\n"
    assert CheckpointStore(run / "checkpoints").tags() == {"good": 2}
    assert paceline("tag", run, "good", "--remove") == 0
    assert CheckpointStore(run / "checkpoints").tags() == {}
    for args in ((run, 2), (run, 2, "latest"), (run, "good", "x", "--remove"), (run, 77, "x")):
        assert paceline("tag", *args) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_export(run, tmp_path, capsys):
    assert paceline("export", run, "best", tmp_path / "m.safetensors") == 0
    assert "safetensors)" in capsys.readouterr().out
    assert "weight" in load_file(tmp_path / "m.safetensors")
    assert paceline("export", run, 1, tmp_path / "m.pt", "--all") == 0
    assert "model/weight" in torch.load(tmp_path / "m.pt", weights_only=True)
    assert paceline("export", run, 1, tmp_path / "m.pt") == 2
    assert paceline("export", run, 1, tmp_path / "m.pt", "--force", "--format", "safetensors") == 0
    assert "weight" in load_file(tmp_path / "m.pt")
    assert paceline("export", run, 1, tmp_path / "x", "--format", "onnx") == 2
    assert paceline("export", run, 9, tmp_path / "x") == 2


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_no_checkpoints_there(tmp_path, capsys, command):
    assert paceline(command, tmp_path) == 2
    assert "there are no checkpoints in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_listing_and_verifying_import_no_torch(run):
    code = (
        "import sys; from paceline.cli import main; "
        f"codes = [main.invoke(main.app, ['checkpoint', c, {str(run)!r}]) for c in ('ls', 'verify')]; "
        "assert codes == [0, 0]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
