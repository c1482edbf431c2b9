"""A folder that comes from elsewhere: nothing outside of it is deleted, read or run, and nothing hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.saving import save
from tests.elastic.supervised_jobs import running
from tests.train.made_journals import MadeRun

from paceline.checkpoint.checksummed_json import decode_document, encode_document
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.cli import main
from paceline.control import supervisor_address
from paceline.control.channel import Channel
from paceline.control.messages import ToolReply
from paceline.control.run_status import RunStatus, WorkerFacts
from paceline.control.supervisor_address import new_secret
from paceline.core.errors import PlatformError, UsageError
from paceline.core.journal import Journal
from paceline.core.session_auth import session_keys
from paceline.elastic.supervisor import tool_client
from paceline.frontends import recomputation
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
NOBODY = 65534


def paceline(*arguments: object) -> int:
    return main.invoke(main.app, list(map(str, arguments)))


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """What must not be touched."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    for name in ("chapter1.tex", "manifest.json", "state.json"):
        (folder / name).write_text(f"precious {name}")
    return folder


def untouched(thesis: Path) -> bool:
    return {path.name: path.read_text() for path in thesis.iterdir()} == {
        name: f"precious {name}" for name in ("chapter1.tex", "manifest.json", "state.json")
    }


def test_a_link_among_the_versions_is_none_and_nothing_behind_it_is_deleted(tmp_path, thesis):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1)
    (tmp_path / "checkpoints" / "v00000007").symlink_to(thesis)
    for step in (2, 3, 4):
        save(store, step, retention=Retention(keep_last=1, keep_best=0))
    assert 7 not in store.versions()
    assert untouched(thesis)
    # Also where it is asked for by name.
    with pytest.raises(PlatformError):
        store.discard(7)
    assert untouched(thesis)


def test_files_of_a_version_that_are_links_are_neither_read_nor_written(tmp_path, thesis):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1)
    part = tmp_path / "checkpoints" / "v00000001" / "part-00-of-02.safetensors"
    part.unlink()
    part.symlink_to(thesis / "chapter1.tex")
    assert any("part-00" in damage.file for damage in store.verify())
    # A file that is put is written beside its place first.
    for name in ("latest.tmp", "tags.json.tmp"):
        (tmp_path / "checkpoints" / name).symlink_to(thesis / "chapter1.tex")
    with pytest.raises(PlatformError):
        save(store, 2)
    assert untouched(thesis)


@pytest.mark.parametrize("name", ["../../thesis/chapter1.tex", "/etc/hostname", "..", "part-0-of-1", "a/b"])
def test_a_manifest_cannot_name_files_outside(tmp_path, thesis, name, capsys):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 1)
    manifest = tmp_path / "run" / "checkpoints" / "v00000001" / "manifest.json"
    body = decode_document(manifest.read_bytes())
    body["files"][0]["name"] = name
    manifest.write_bytes(encode_document(body))
    (damage, *_) = store.verify()
    assert "is not the name of a checkpoint's file" in str(damage)
    assert paceline("checkpoint", "show", tmp_path / "run") != 0
    assert "precious" not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["v00000001/manifest.json", "latest", "v00000001/state.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, where, capsys):
    save(CheckpointStore(tmp_path / "run" / "checkpoints"), 1)
    file = tmp_path / "run" / "checkpoints" / where
    file.unlink()
    os.mkfifo(file)
    assert paceline("checkpoint", "verify", tmp_path / "run") == 1
    assert "regular file" in capsys.readouterr().out
    paceline("checkpoint", "ls", tmp_path / "run")


@pytest.mark.parametrize("name", ["journal.jsonl", "crew", "logs/rank-0.log", "supervisor.json", "lock"])
def test_a_run_does_not_write_through_links_of_a_folder_that_was_there(tmp_path, thesis, name):
    config = TrainConfig(run_dir=str(tmp_path / "run"), resume="auto").resolved(1)
    folder = RunFolder.create(config)
    (folder.path / name).symlink_to(thesis / "chapter1.tex")
    with pytest.raises(UsageError, match="is a link"):
        RunFolder.for_config(config)
    assert untouched(thesis)


def test_a_journal_is_not_appended_to_through_a_link(tmp_path, thesis):
    (tmp_path / "journal.jsonl").symlink_to(thesis / "chapter1.tex")
    with pytest.raises(PlatformError):
        Journal(tmp_path / "journal.jsonl")
    assert untouched(thesis)


@pytest.mark.parametrize("name", ["journal.jsonl", "command.json"])
def test_pipes_in_a_runs_folder_do_not_hang_its_readers(tmp_path, name, capsys):
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1))
    os.mkfifo(folder.path / name)
    arguments = ["audit"] if name == "journal.jsonl" else ["replay", "--step", "1", "--shard", "0"]
    assert paceline(arguments[0], folder.path, *arguments[1:]) != 0
    assert "regular file" in capsys.readouterr().err


# -- control.json: who is proved what


def whereabouts(folder: Path, port: int, secret: str = "control.secret") -> None:
    supervisor_address.write(
        folder, supervisor_address.SupervisorAddress(host="127.0.0.1", port=port, pid=1, secret=secret)
    )


@pytest.mark.parametrize("command", [["status"], ["stop"], ["scale", "--workers", "2"]])
def test_control_json_cannot_name_another_secret(tmp_path, command, capsys):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        supervisor_address.write_secret(folder, new_secret())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name in ("../mine/control.secret", str(mine / "control.secret")):
            whereabouts(theirs, listener.getsockname()[1], name)
            assert paceline(command[0], theirs, *command[1:]) == 2
            assert "can only be control.secret" in capsys.readouterr().err
        (theirs / "control.secret").unlink()
        (theirs / "control.secret").symlink_to(mine / "control.secret")
        whereabouts(theirs, listener.getsockname()[1])
        assert paceline(command[0], theirs, *command[1:]) != 0
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()  # no command ever connected


@needs_root
@pytest.mark.parametrize("whose", [".", "control.json", "control.secret"])
def test_a_folder_of_another_user_gets_no_token(tmp_path, whose, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    supervisor_address.write_secret(folder, new_secret())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        whereabouts(folder, listener.getsockname()[1])
        os.chown(folder / whose, NOBODY, NOBODY)
        assert paceline("status", folder) == 2
        said = capsys.readouterr().err
        assert "belongs to another user" in said
        assert "--token-file" in said
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@needs_root
def test_with_the_token_named_a_run_of_another_user_is_shown(tmp_path, capsys):
    folder, token = tmp_path / "run", tmp_path / "token"
    with running(folder, workers=1, steps=10**6) as run:
        run.until_step(2)
        token.write_text((folder / "control.secret").read_text())
        os.chown(folder, NOBODY, NOBODY)
        assert paceline("status", folder, "--token-file", token) == 0
        assert "running" in capsys.readouterr().out
        os.chown(folder, os.geteuid(), os.getegid())
        run.supervised.kill()


# -- replay


def recorded(folder: Path, script: Path) -> None:
    command = {"script": str(script), "arguments": [], "folder": str(folder), "settings": []}
    (folder / "command.json").write_text(json.dumps(recomputation.signed(command)))


EVIL = "from pathlib import Path\nPath({!r}).write_text('ran')\n"


def test_a_script_inside_the_folder_is_not_run_unasked(tmp_path, capsys):
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1)).path
    mark = tmp_path / "mark"
    script = folder / "train.py"
    script.write_text(EVIL.format(str(mark)))
    for named in (script, folder / ".." / "run" / "train.py", Path("train.py")):
        recorded(folder, named)
        assert paceline("replay", folder, "--step", "1", "--shard", "0") == 2
        assert "--script" in capsys.readouterr().err
        assert not mark.exists()
    paceline("replay", folder, "--step", "1", "--shard", "0", "--script", script)
    assert mark.exists()


@pytest.mark.parametrize("command", ["replay", "verify"])
def test_what_an_unpacked_folder_names_is_not_run_unasked(tmp_path, capsys, command, monkeypatch):
    made = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1)).path
    mark, script = tmp_path / "mark", tmp_path / "train.py"
    script.write_text("import sys\nfrom pathlib import Path\nPath(sys.argv[1]).write_text('ran')\n")
    record = {"script": str(script), "arguments": [str(mark)], "folder": str(tmp_path), "settings": []}
    (made / "command.json").write_text(json.dumps({**record, "tag": "0" * 64}))
    folder = tmp_path / "unpacked"
    subprocess.run(["cp", "-r", made, folder], check=True)  # as `tar -x` does: all of it is the caller's
    which = ("--step", "1", "--shard", "0") if command == "replay" else ()
    # Neither a script outside of the folder, nor arguments for one that the caller names.
    assert paceline(command, folder, *which) == 2
    told = capsys.readouterr().err
    assert "was not written by this user" in told
    assert f"--script {script} -- {mark}" in told
    paceline(command, folder, *which, "--script", script)
    assert not mark.exists()
    # The tag of another user's key is none either; that of one's own holds for what was recorded, and moves.
    with monkeypatch.context() as other:
        other.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
        (folder / "command.json").write_text(json.dumps(recomputation.signed(record)))
    assert paceline(command, folder, *which) == 2
    signed = recomputation.signed(record)
    (folder / "command.json").write_text(json.dumps({**signed, "script": "/else.py"}))
    assert paceline(command, folder, *which) == 2
    assert not mark.exists()
    (folder / "command.json").write_text(json.dumps(signed))
    paceline(command, folder, *which)
    assert mark.exists()


@needs_root
@pytest.mark.parametrize("whose", [".", "command.json"])
def test_a_script_that_another_user_names_is_not_run_unasked(tmp_path, whose, capsys):
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1)).path
    mark, script = tmp_path / "mark", tmp_path / "train.py"
    script.write_text(EVIL.format(str(mark)))
    recorded(folder, script)
    os.chown(folder / whose, NOBODY, NOBODY)
    assert paceline("replay", folder, "--step", "1", "--shard", "0") == 2
    assert "belongs to another user" in capsys.readouterr().err
    assert not mark.exists()


# -- the terminal


HOSTILE = "f1[/macro]\x1b]0;title\x07\x1b]52;c;aGk=\x07\x9b2J\u202e"


def test_names_of_a_checkpoint_reach_the_terminal_without_escapes_and_markup(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 1)
    manifest = tmp_path / "run" / "checkpoints" / "v00000001" / "manifest.json"
    body = decode_document(manifest.read_bytes())
    body["metrics"] = {HOSTILE: 0.5}
    body["note"] = HOSTILE
    manifest.write_bytes(encode_document(body))
    for command in (["ls", tmp_path / "run"], ["show", tmp_path / "run"], ["verify", tmp_path / "run"]):
        # `latest` has another checksum of this manifest, which verify tells.
        assert paceline("checkpoint", *command) == (1 if command[0] == "verify" else 0)
        captured = capsys.readouterr()
        assert_plain(captured.out + captured.err)
        if command[0] != "verify":
            assert "f1[/macro]" in captured.out


def test_names_of_files_reach_logs_without_escapes(tmp_path, caplog, capsys):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 1)
    version = tmp_path / "run" / "checkpoints" / "v00000001"
    (version / HOSTILE.replace("/", "")).touch()
    assert paceline("checkpoint", "show", tmp_path / "run") == 0
    captured = capsys.readouterr()
    assert "is not in the manifest" in caplog.text
    assert_plain(caplog.text + captured.out + captured.err)


@pytest.mark.parametrize(
    ("field", "value"), [("created", 1e300), ("step", "x"), ("parent", [1]), ("note", 5), ("workers", 1.5)]
)
def test_a_manifest_with_values_that_no_checkpoint_has(tmp_path, field, value, capsys):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 1)
    manifest = tmp_path / "run" / "checkpoints" / "v00000001" / "manifest.json"
    manifest.write_bytes(encode_document({**decode_document(manifest.read_bytes()), field: value}))
    assert paceline("checkpoint", "ls", tmp_path / "run") == (0 if field == "note" else 1)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize("file", ["v00000001/manifest.json", "tags.json", "latest"])
def test_a_document_without_end_is_not_read(tmp_path, file, capsys):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 1)
    store.tag(1, "good")
    os.truncate(tmp_path / "run" / "checkpoints" / file, 1 << 40)
    assert paceline("checkpoint", "verify", tmp_path / "run") == 1
    assert "are the most" in capsys.readouterr().out


def assert_plain(text: str) -> None:
    assert not [character for character in text if character in "\x1b\x07\x9b\u202e"]


def test_what_a_journal_says_reaches_the_terminal_without_escapes(tmp_path, capsys):
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1))
    with folder.journal_file.open("w") as file:
        line = {"type": "run_ended", "time": 1.0, "step": 3, "epoch": 0, "reason": HOSTILE, "hash": HOSTILE}
        file.write(json.dumps(line) + "\n")
    paceline("audit", folder.path)
    captured = capsys.readouterr()
    assert "final" in captured.out
    assert_plain(captured.out + captured.err)
    assert paceline("status", folder.path) == 3
    assert_plain(capsys.readouterr().err)


def test_host_names_of_workers_reach_the_terminal_without_escapes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PACELINE_HOST", HOSTILE.replace("\x07", ""))
    with running(tmp_path, workers=1, steps=10**6) as run:
        run.until_step(2)
        assert paceline("status", tmp_path) == 0
        out = capsys.readouterr().out
        assert "f1[/macro]" in out
        assert_plain(out)
        run.supervised.kill()


def test_what_the_supervisor_of_a_folder_answers_reaches_the_terminal_without_escapes(
    tmp_path, capsys, monkeypatch
):
    """control.json and control.secret of an unpacked folder lead to a supervisor of its maker."""
    supervisor_address.write_secret(tmp_path, new_secret())
    whereabouts(tmp_path, 1)
    worker = WorkerFacts(rank=0, member=1, pid=2, host=HOSTILE, place=0, phase=HOSTILE, step=3)
    facts = RunStatus(phase=HOSTILE, generation=1, step=3, workers=(worker,)).to_plain()
    for command in (["status"], ["status", "--json"], ["stop"], ["scale", "-n", "2"]):
        ours, theirs = socket.socketpair()
        maker = Channel(theirs, session_keys(b"s" * 32, b"", accepts=True))
        maker.send(ToolReply(done=True, text=HOSTILE, facts=facts))
        opened = Channel(ours, session_keys(b"s" * 32, b"", accepts=False))
        monkeypatch.setattr(tool_client, "open_channel", lambda *_, opened=opened: opened)
        assert paceline(*command, tmp_path) == 0
        maker.close()
        captured = capsys.readouterr()
        assert "f1[/macro]" in captured.out
        assert_plain(captured.out + captured.err)


@pytest.mark.parametrize("file", ["pipe", "/dev/zero", "sparse"])
def test_certificates_that_a_folder_names_are_small_regular_files(tmp_path, file, capsys):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    supervisor_address.write_secret(tmp_path, new_secret())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        named = {name: str(tmp_path / file) for name in ("certificate", "key", "authority")}
        plain = {"host": "127.0.0.1", "port": listener.getsockname()[1], "pid": 1, **named}
        (tmp_path / "control.json").write_text(json.dumps(plain))
        assert paceline("status", tmp_path) != 0


# -- memory


@pytest.mark.parametrize("file", ["journal.jsonl", "config.toml"])
def test_a_file_without_end_does_not_fill_the_memory(tmp_path, file):
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1)).path
    (folder / "journal.jsonl").touch()
    with (folder / file).open("ab") as sparse:
        sparse.truncate((5 << 28) if file == "journal.jsonl" else (1 << 40))
    found = subprocess.run(
        [sys.executable, "-c", AUDIT.replace("8 << 30", "1 << 30"), folder],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "MemoryError" not in found.stderr
    said = found.stdout + found.stderr
    assert "1 damaged line" in said if file == "journal.jsonl" else "more than" in said


def test_a_nesting_without_end_is_damage(tmp_path, capsys):
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1)).path
    (folder / "journal.jsonl").touch()
    (folder / "config.toml").write_text("a = " + "[" * 100_000)
    assert paceline("audit", folder) != 0
    assert "is damaged" in capsys.readouterr().err


AUDIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from paceline.cli.main import run
run(["audit", sys.argv[1]])
"""


@pytest.mark.parametrize(
    "line",
    [
        {
            "type": "steps_received",
            "rank": 0,
            "pid": 1,
            "generation": 1,
            "first": 1,
            "last": 10**11,
            "shards": [],
        },
        {"type": "step_committed", "step": 10**11, "epoch": 0, "loss": 1.0, "samples": 1},
        {
            "type": "step_committed",
            "step": 1,
            "epoch": 10**11,
            "loss": 1.0,
            "samples": 1,
            "offset": 0,
            "taken": 1,
        },
    ],
    ids=["receipt", "step", "epoch"],
)
def test_one_line_does_not_make_the_audit_use_all_memory(tmp_path, line):
    made = MadeRun(5, trouble=0.4).run()
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path / "run")).resolved(1))
    with Journal(folder.journal_file) as file:
        for event in made:
            file.append(event)
    with folder.journal_file.open("a") as lines:
        lines.write(json.dumps({**line, "time": 1.0}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, str(folder.path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "wrong" in done.stdout, done.stderr
