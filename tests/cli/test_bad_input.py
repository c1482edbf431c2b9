"""Bad input to every command: one message that says what is wrong and what to do, the right exit code, no
traceback, and nothing that hangs.

missing file, bad key, port taken, no permission, unknown run, a script that raises, one that exits with 3,
Ctrl-C; a command for which a case has no meaning is not in its list. What scripts and signals do to `paceline
run` is in tests/frontends/launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.made_runs import Command, write_log, write_run
from tests.train.made_journals import MadeRun

from paceline.cli import main
from paceline.cli.main import Commands
from paceline.core.errors import PlatformError
from paceline.core.listen_address import listener
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state import run_lock
from paceline.train.state.run_folder import RunFolder, find_latest

JOURNAL = MadeRun(5, trouble=0.2, epochs=1).run()
TOKEN = "ab" * 32


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a run, a script and a token."""
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "one", JOURNAL)
    write_log(run, 0, "12:00:00.000 info [rank 0] hello")
    (tmp_path / "script.py").write_text("print('trained')\n")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "bad.toml").write_text("wokers = 2\n")
    (tmp_path / "ddp.json").write_text('{"batch_size": 32, "num_gpu": 4}')
    (tmp_path / "nodes.json").write_text('{"batch_size": 32, "num_gpus": 4, "num_nodes": 2}')
    (tmp_path / "lr.toml").write_text("workers = 2\nlr = 0.1\n")
    (tmp_path / "torn.json").write_text('{"workers": ')
    (tmp_path / "list.json").write_text("[]")
    return tmp_path


def check(found: tuple[int, str, str], code: int, said: str) -> None:
    given, out, err = found
    assert (given, said in err) == (code, True), err or out
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert "unexpected" not in err


MISSING_FILE = [
    ("train missing.py", 2, "the script missing.py cannot be read: No such file"),
    ("train --script missing.py", 2, "the script missing.py cannot be read: No such file"),
    ("train", 2, "no script is given"),
    ("run missing.py", 2, "the script missing.py cannot be read: No such file"),
    ("run -m missing.module", 2, "there is no module missing.module"),
    ("report runs/one -o .", 1, "the report cannot be written to .: Is a directory"),
    ("monitor script.py", 2, "script.py is not the folder of a run: it is a file"),
    ("train script.py --config missing.toml", 2, "missing.toml cannot be read: No such file"),
    ("train script.py --config script.py", 2, "the suffix '.py' is not one of .toml, .json"),
    ("train script.py --config torn.json", 2, "torn.json is not valid JSON"),
    ("train script.py --config list.json", 2, "not a table of settings"),
    ("join 127.0.0.1:1 --token-file missing", 2, "missing holds no job secret"),
    ("status runs/one --token-file missing", 0, ""),
    ("doctor --hosts a --token-file missing", 2, "missing holds no job secret"),
    ("verify runs/one --script missing.py", 2, "missing.py"),
    ("replay runs/one --step 1 --shard 0 --script missing.py", 2, "missing.py"),
    ("checkpoint ls runs/one", 2, "there are no checkpoints in runs/one"),
    ("ls missing", 2, "there is no folder"),
    ("gc missing", 2, "there is no folder"),
]


@pytest.mark.parametrize(("line", "code", "said"), [case for case in MISSING_FILE if case[1]])
def test_a_missing_file(place, paceline, line, code, said):
    check(paceline(*line.split()), code, said)


BAD_KEY = [
    ("train script.py --set wokers=2", 2, "did you mean workers?"),
    ("train script.py --config bad.toml", 2, "bad.toml: unknown key wokers"),
    ("train script.py --config ddp.json", 2, "did you mean num_gpus?"),
    ("train script.py --config nodes.json", 2, "paceline run --nnodes 2"),
    ("train script.py --config lr.toml", 2, "the learning rate is the optimizer's"),
    ("train script.py --set batch_size=2", 2, "use global_batch="),
    ("train script.py --num-gpus 0", 2, "num_gpus=0"),
    ("train script.py --num-gpus 2 --workers 3", 2, "each GPU has one worker"),
    ("train script.py --num-gpus 8 --num-nodes 2 --gpus-per-node 3", 2, "gpus_per_node=3 = 6, not 8"),
    ("train script.py --num-nodes 2", 2, "paceline join"),
    ("train script.py --num-nodes 2", 2, "paceline run --nnodes 2"),
    ("train script.py --num-nodes 0", 2, "give --num-nodes 1"),
    ("train script.py --address 10.0.0.5:6379", 2, "paceline join HOST:PORT"),
    ("train script.py --backend ray --engine slurm", 2, "contradict each other"),
    ("train script.py --backend horovod", 1, "needs the package horovod"),
    ("train script.py --backend nccl", 2, "how gradients travel is chosen for you"),
    ("train script.py --backend spark", 2, "'spark' is unknown"),
    ("train script.py --workers many", 2, "--workers"),
    ("run --bogus", 2, "is no option of paceline run"),
    ("run --nnodes x script.py", 2, "--nnodes is a whole number"),
    ("init --name a/b", 2, "cannot be part of a folder's name"),
    ("logs runs/one --rank 4", 2, "it has those of rank 0"),
    ("monitor runs/one --interval 0", 2, "interval"),
    ("scale runs/one --workers 0", 2, "0 workers cannot train"),
    ("join nowhere --token-file token", 2, "is not HOST:PORT"),
    ("gc --older-than soon", 2, "is not a time"),
    ("verify runs/one --steps some", 2, "is not a choice of steps"),
    ("replay runs/one --step 1", 2, "--shard"),
    ("simulate --schedules 0", 2, "--schedules"),
    ("doctor --hosts a,,b --token-file token", 2, "is no host"),
    ("bench comm --size big", 2, "is not a size"),
    ("bench scaling --workers one", 2, "is no list of numbers"),
    ("bench scaling --workers 1,2 --batch 1", 2, "cannot be shared by 2 workers"),
    ("checkpoint show runs/one nosuch", 2, "there are no checkpoints"),
    ("completion tcsh", 2, "name one: paceline completion bash|zsh|fish"),
    ("report runs/one --bogus", 2, "No such option"),
    ("audit runs/one --bogus", 2, "No such option"),
    ("status runs/one --bogus", 2, "No such option"),
    ("stop runs/one --bogus", 2, "No such option"),
    ("ls --bogus", 2, "No such option"),
    ("submit script.py --engine spark", 2, "there is no engine 'spark'"),
    ("tune script.py --bogus", 2, "No such option"),
    ("queue --bogus", 2, "No such option"),
    ("info --bogus", 2, "No such option"),
]


@pytest.mark.parametrize(("line", "code", "said"), BAD_KEY)
def test_a_bad_key_or_value(place, paceline, line, code, said):
    check(paceline(*line.split()), code, said)


def test_every_command_has_a_bad_key():
    assert {line.split()[0] for line, _, _ in BAD_KEY} >= Commands.table.keys()


def leaves(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    command = typer.main.get_command(main.app) if command is None else command
    names = list(getattr(command, "commands", ()))
    if not names:
        yield path
    for name in names:
        yield from leaves(command.get_command(None, name), (*path, name))


@pytest.mark.parametrize("words", list(leaves()), ids=" ".join)
def test_an_unknown_option_of_every_command(place, paceline, words):
    check(paceline(*words, "--bogus"), 2, "--bogus")


UNKNOWN_RUN = [
    *((f"{command} nowhere", 2) for command in ("monitor", "logs", "report", "audit", "verify")),
    ("replay nowhere --step 1 --shard 0", 2),
    *((f"checkpoint {command} nowhere", 2) for command in ("ls", "show", "verify")),
    ("checkpoint diff nowhere 1 2", 2),
    ("checkpoint tag nowhere 1 good", 2),
    ("checkpoint export nowhere 1 model.pt", 2),
    *((f"{command} nowhere", 6) for command in ("status", "stop")),
    ("scale nowhere --workers 2", 6),
]


@pytest.mark.parametrize(("line", "code"), UNKNOWN_RUN)
def test_an_unknown_run(place, paceline, line, code):
    check(paceline(*line.split()), code, "nowhere")


@pytest.mark.parametrize("command", ["stop", "scale --workers 2"])
def test_a_run_that_has_ended(place, paceline, command):
    name, *options = command.split()
    for run in ("runs/one", "one"):
        check(paceline(name, run, *options), 3, "has ended after step 7: finished")


TRAINS = """
import paceline, torch
trainer = paceline.Trainer(
    torch.nn.Linear(2, 1), torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
    config=paceline.TrainConfig(progress=False, run_dir="run"),
)
trainer.fit((torch.zeros(8, 2), torch.zeros(8, 1)))
"""

# Every command that listens; the others only connect. `join` listens for its workers, at ports of the range
# that it is given, which its job tells it to: tests/network has that.
PORT_TAKEN = [
    (
        "doctor --serve --bind 127.0.0.1 --port {port} --token-file token",
        "127.0.0.1:{port} cannot be listened at: Address already in use",
    ),
    ("run --master-port {port} script.py", "rank 0 cannot serve at 127.0.0.1:{port}: Address already in use"),
    (
        "run --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port {port} script.py",
        "node 0 cannot serve at 127.0.0.1:{port}: Address already in use",
    ),
    (
        "train trains.py --set fault_tolerance.port={port}",
        "the supervisor cannot listen at 127.0.0.1:{port}: another program does",
    ),
    (
        "train trains.py --set fault_tolerance.ports={port}",
        "no port of the range {port} is free at 127.0.0.1",
    ),
]


@pytest.mark.parametrize(("line", "said"), PORT_TAKEN)
def test_a_port_that_is_taken(place, capfd, line, said):
    """Also what other processes of the command print is looked at."""
    (place / "trains.py").write_text(TRAINS)
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        check(Command(capfd)(*line.format(port=port).split()), 1, said.format(port=port))


def test_a_port_at_which_no_job_listens(place, paceline):
    check(
        paceline("join", "127.0.0.1:1", "--token-file", "token"), 1, "there is no supervisor at 127.0.0.1:1"
    )


def test_a_port_that_is_taken_is_a_finding_of_the_doctor(place, paceline):
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code, out, _ = paceline("doctor", "--master-port", port, "--checkpoint-dir", place)
    assert code == 1
    assert f"{port} cannot be listened at" in out


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As a user to whom files of mode 0 are closed."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def open_to_all(place: Path) -> None:
    """Let any user into the working folder, and into its runs. Who made the folders above it had only their
    owner enter."""
    above = [path for path in place.parents if path.stat().st_mode & 0o005 == 0]
    for path in (place, *above, *(place / "runs").rglob("*"), place / "runs"):
        path.chmod(path.stat().st_mode | 0o755)


NO_PERMISSION = [
    *(f"{command} closed/run" for command in ("monitor", "logs", "report", "audit", "status", "verify")),
    *("stop closed/run", "scale closed/run --workers 2", "replay closed/run --step 1 --shard 0"),
    *("ls closed", "gc closed", "ls closed/run", "init closed/run", "checkpoint ls closed/run"),
    *("checkpoint show closed/run", "checkpoint verify closed/run", "checkpoint diff closed/run 1 2"),
    *("checkpoint tag closed/run 1 good", "checkpoint export closed/run 1 model.pt"),
    *("run closed/script.py", "report runs/one --json closed/r.json"),
    *("train closed/script.py", "train --script closed/script.py", "train script.py --config closed/c.toml"),
    *("report runs/one -o closed/r.html", "report runs/one --junit closed/r.xml"),
    *("join 127.0.0.1:1 --token-file closed/token", "doctor --hosts a --token-file closed/token"),
    "doctor --serve --bind 127.0.0.1 --token-file closed/token",
]


@pytest.mark.parametrize("line", NO_PERMISSION)
def test_no_permission(place, paceline, line):
    closed = place / "closed"
    write_run(closed / "run", JOURNAL)
    # Before the folder is closed to it: what the command imports may be closed to that user as well.
    warm_up = ["--older-than", "999w"] if line.startswith("gc") else []
    if "--serve" not in line:
        paceline(*line.split(), *warm_up)
    open_to_all(place)
    closed.chmod(0)
    try:
        with unprivileged():
            code, out, err = paceline(*line.split())
    finally:
        closed.chmod(0o755)
    assert code in (1, 2), out
    assert "Permission denied" in err, err
    assert "unexpected" not in err
    assert "Traceback" not in err


@pytest.fixture
def closed(place):
    """A folder into which only its owner may look; who looks is another."""
    folder = place / "runs" / "closed"
    write_run(folder, JOURNAL)
    open_to_all(place)
    folder.chmod(0)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("command", ["ls", "gc --older-than 0s", "audit", "monitor --once"])
def test_a_run_of_another_user_does_not_hide_ones_own(closed, paceline, command):
    closed.chmod(0o755)
    paceline(*command.split())  # what it imports may be closed to that user as well
    closed.chmod(0)
    with unprivileged():
        code, out, err = paceline(*command.split())
    assert code == 0, err
    assert "one" in out
    named = "left out, closed to this user: closed" in err
    assert named == (command[:2] in ("ls", "gc")), err


def test_a_closed_folder_for_checkpoints_is_a_finding_of_the_doctor(closed, paceline):
    paceline("doctor", "--checkpoint-dir", closed.parent / "new")
    with unprivileged():
        code, out, err = paceline("doctor", "--checkpoint-dir", closed / "new")
    assert code == 1
    assert f"{closed / 'new'} cannot be written: Permission denied" in out
    assert err == ""


def test_a_closed_folder_for_a_run(closed):
    config = TrainConfig(run_dir=str(closed / "new"))
    with unprivileged(), pytest.raises(PlatformError, match="cannot be read: Permission denied"):
        RunFolder(Path(config.run_dir or "")).holds_run()
    with unprivileged(), pytest.raises(PlatformError, match="Permission denied"):
        RunFolder.for_config(config)
    with unprivileged():
        assert find_latest("train", root=closed.parent) is None


RAISES = "import sys\ndef inner():\n    raise KeyError('no such column')\ninner()\n"


def program(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("line", ["train script.py", "train --script script.py"])
def test_a_script_that_raises_or_exits(place, line):
    (place / "script.py").write_text(RAISES)
    done = program(place, *line.split())
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == "KeyError: 'no such column'"
    assert "src/paceline" not in done.stderr  # the user's frames alone
    (place / "script.py").write_text("import sys\nsys.exit(3)\n")
    done = program(place, *line.split())
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


# Each waits for ever, or for minutes; what it prints when it does so.
WAITING = {
    "train": ("train wait.py", "waiting", 130),
    "monitor": ("monitor runs/one", "one: ", 130),
    "logs": ("logs runs/one -f", "rank 0 |", 130),
    "doctor": ("doctor --serve --bind 127.0.0.1 --port {port} --token-file token", "serving at", 130),
    "join": ("join 127.0.0.1:{silent} --token-file token", "", 130),
    "run": ("run wait.py", "waiting", 130),
    "verify": ("verify runs/one --script wait.py", "waiting", 130),
    "replay": ("replay runs/one --step 1 --shard 0 --script wait.py", "waiting", 130),
    "bench": ("bench scaling --workers 1 --steps 1000000", "", 130),
    "bench comm": ("bench comm --ranks 2 --size 4KB --rounds 1000000 --no-save", "", 130),
    "queue": ("queue serve --queue queue", "serving the queue", 130),
    "simulate": ("simulate --schedules 1000000 --workers 2", "", 0),
}


# None of them waits for anything but a file, or for seconds at most for the supervisor of a run.
AT_ONCE = {
    "init",
    "ls",
    "gc",
    "status",
    "scale",
    "stop",
    "submit",  # but with --wait, which waits for the engine
    "report",
    "audit",
    "info",
    "checkpoint",
    "completion",
}


# It searches with Optuna, which the environment of these tests does not have.
ELSEWHERE = {"tune"}


def test_every_command_waits_or_ends_at_once():
    assert {line.split()[0] for line, _, _ in WAITING.values()} | AT_ONCE | ELSEWHERE == Commands.table.keys()


@pytest.mark.parametrize("command", WAITING)
def test_ctrl_c(place, command):
    line, shown, code = WAITING[command]
    with listener("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    (place / "wait.py").write_text("import signal\nprint('waiting', flush=True)\nsignal.pause()\n")
    kept = []
    with (
        listener("127.0.0.1", 0) as mute,  # takes connections, and never says a word
        in_progress(place / "runs" / "one"),
        started(place, *line.format(port=port, silent=mute.getsockname()[1]).split()) as child,
    ):
        assert child.stdout is not None
        if shown:
            for text in iter(child.stdout.readline, ""):
                if shown in text:
                    break
        elif "{silent}" in line:
            kept.append(mute.accept()[0])
        else:
            wait_for_work(child.pid, in_processes=command.startswith("bench"))
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    for connection in kept:
        connection.close()
    assert child.returncode == code
    assert "Traceback" not in err


@contextlib.contextmanager
def started(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program, as a terminal starts it: what runs tests in the background may ignore SIGINT, which
    children inherit. It is gone in the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def in_progress(run: Path) -> Iterator[None]:
    with run_lock.held(run / "lock", "the run"):
        yield


def wait_for_work(pid: int, *, in_processes: bool) -> None:
    """Until the process has imported what it needs, and has begun to work, itself or in processes. An import
    of torch may swallow a KeyboardInterrupt."""
    over = threading.Event()
    while not over.wait(0.05):
        if in_processes:
            if Path(f"/proc/{pid}/task/{pid}/children").read_text().strip():
                return
            continue
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if int(fields[11]) + int(fields[12]) > 60:  # hundredths of a second of processor time
            return
