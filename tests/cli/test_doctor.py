"""`paceline doctor` as a command: lines or JSON, exit code 1 where something is wrong, its serving end."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import subprocess
import sys

import pytest
from tests.cli.made_runs import Command

from paceline.control import supervisor_address
from paceline.core.listen_address import listener


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


def test_lines_and_json_say_the_same(tmp_path, paceline):
    code, out, err = paceline("doctor", "--checkpoint-dir", tmp_path / "checkpoints")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("ok       python             3.")
    assert lines[-1].endswith(", 0 wrong")
    code, out, _ = paceline("doctor", "--checkpoint-dir", tmp_path / "checkpoints", "--json")
    facts = json.loads(out)
    assert code == facts["wrong"] == 0
    assert facts["ok"] + facts["warning"] == len(facts["findings"])
    assert {"topic", "verdict", "text", "remedy"} == facts["findings"][0].keys()
    shown = [line for line in lines if line.startswith(("ok ", "warning ", "wrong "))]
    assert len(shown) == len(facts["findings"])


def test_what_is_wrong_is_code_1_with_what_to_do(tmp_path, paceline):
    (tmp_path / "file").touch()
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code, out, _ = paceline(
            "doctor", "--master-addr", "127.0.0.1", "--master-port", port,
            "--checkpoint-dir", tmp_path / "file" / "below",
        )  # fmt: skip
    assert code == 1
    assert f"wrong    port               {port} cannot be listened at: Address already in use" in out
    assert "try: give another --master-port" in out
    assert "cannot be written: Not a directory" in out
    assert out.splitlines()[-1].endswith(", 2 wrong")


def test_two_machines_are_measured(tmp_path, paceline):
    with listener("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    token = tmp_path / "token"
    command = [sys.executable, "-m", "paceline", "doctor", "--serve", "--bind", "127.0.0.1"]
    command += ["--port", str(port), "--token-file", str(token)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
        contextlib.ExitStack() as at_last,
    ):
        at_last.callback(child.kill)
        assert child.stdout is not None
        assert child.stdout.readline().startswith(f"made {token}: copy it")
        assert child.stdout.readline().startswith(f"serving at 127.0.0.1:{port} for 10 minutes")
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert len(supervisor_address.read_token(token)) == 32
        code, out, _ = paceline(
            "doctor", "--hosts", f"127.0.0.1:{port}", "--token-file", token, "--checkpoint-dir", tmp_path
        )
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=30)
    assert code == 0
    assert f"here -> 127.0.0.1:{port}" in out
    assert "MB/s" in out
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--hosts", "a"], 2, "give --token-file FILE"),
        (["--hosts", "a", "--token-file", "missing"], 2, "missing holds no job secret"),
        (["--hosts", "a:b:c", "--token-file", "missing"], 2, "missing holds no job secret"),
        (["--hosts", "a,,b", "--token-file", "missing"], 2, "is no host"),
        (["--serve"], 2, "give --token-file FILE"),
        (["--master-port", "70000"], 2, "--master-port"),
        (["--serve", "--bind", "192.0.2.1", "--token-file", "made"], 1, "192.0.2.1:41900 cannot be listened"),
        (["--serve", "--token-file", "file/below"], 1, "the secret cannot be written to file/below"),
    ],
)
def test_mistakes_come_before_the_first_line(tmp_path, monkeypatch, paceline, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given, out, err = paceline("doctor", *arguments)
    assert given == code
    assert said in err
    assert "ok " not in out
