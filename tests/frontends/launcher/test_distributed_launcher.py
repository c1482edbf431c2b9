"""The launcher of one node: plain DDP, failures and restarts, exit codes, signals; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.core.free_ports import free_range
from tests.engines.local.processes import all_gone, watch
from tests.frontends.launcher.launched import launched, write
from tests.waiting import wait_for

import paceline
from paceline import LaunchConfig
from paceline.cli import main
from paceline.engines.local.failure_report import FailureReport, FailureRole
from paceline.engines.local.script_ranks import RankEnd, first_failure
from paceline.frontends.launcher.master_port import free_port

DDP = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == 2 and "fail" in sys.argv[1:] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        optimizer.step()
    print("weights", model.module.weight.tolist())
    dist.destroy_process_group()
"""


def test_a_plain_ddp_script_and_its_restart_after_a_kill(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, DDP)
    quiet = launched(capfd, script, nproc_per_node=2)
    assert (quiet.code, quiet.said) == (0, []), quiet.err
    assert quiet.of(0) == quiet.of(1)
    assert quiet.of(0)[0].startswith("weights [[")
    failed = launched(capfd, script, "fail", nproc_per_node=2, master_port=free_range(1)[0])
    assert failed.code == 0
    assert failed.of(0) == quiet.of(0)
    first, again = failed.said
    assert "rank 1 of 2 failed first (pid " in first
    assert first.endswith("it was killed by signal 9 (SIGKILL)")
    assert again == "paceline run: all 2 ranks start again (restart 1 of 3)"


@pytest.mark.parametrize(
    ("source", "code", "how"),
    [
        ("sys.exit(3)", 3, "it called sys.exit(3)"),
        ("sys.exit('no data')", 1, "it called sys.exit(no data)"),
        ("raise ValueError('no data')", 1, "it raised ValueError: no data"),
        ("os._exit(4)", 4, "it exited with code 4"),
        ("os.kill(os.getpid(), 11)", 139, "it was killed by signal 11 (SIGSEGV)"),
        ("raise KeyboardInterrupt", 130, "it called sys.exit(130)"),
        ("x ===", 1, "it raised SyntaxError: invalid syntax"),
    ],
)
def test_the_first_failing_rank_gives_the_code_and_is_shown_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, code: int, how: str
) -> None:
    body = f"import os, sys, time\nprint('before')\nif os.environ['RANK'] == '1':\n    {source}\n"
    script = write(tmp_path, body if "===" not in source else source)
    done = launched(capfd, script, nproc_per_node=2, max_restarts=0)
    assert done.code == code
    # The other rank may have ended before: it is stopped, or has nothing to do.
    said = "\n".join(done.said)
    assert how in done.said[0], said
    assert "failed first" in done.said[0]
    if "===" not in source:
        assert "rank 1 of 2" in done.said[0]
        assert "last lines of rank 1:\n  before" in said
    if "ValueError" in source:
        assert f'File "{script}", line 4, in <module>' in said
    assert "paceline/engines" not in "\n".join(done.err)  # no line of ours
    assert "script_rank" not in "\n".join(done.err)
    assert ("Traceback (most recent call last):" in said) == ("ValueError" in source)


def test_restarts_are_counted_and_have_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "import os; print(os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['MASTER_PORT']); exit(5)"
    done = launched(capfd, write(tmp_path, source), max_restarts=2)
    assert done.code == 5
    counts, ports = zip(*(line.split() for line in done.of(0)), strict=True)
    assert counts == ("0", "1", "2")
    assert len(set(ports)) == 3
    assert [line for line in done.said if "again (" in line] == [
        "paceline run: the rank starts again (restart 1 of 2)",
        "paceline run: the rank starts again (restart 2 of 2)",
    ]


def test_the_others_are_asked_to_end_and_then_made_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        """
        import os, signal, sys, threading
        deaf = threading.Event()
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
            open(sys.argv[1], "w").close()
            while True:
                deaf.wait(1)
        while not os.path.exists(sys.argv[1]):
            deaf.wait(0.01)
        sys.exit(7)
        """,
    )
    done = launched(capfd, script, tmp_path / "there", nproc_per_node=2, max_restarts=0, shutdown_timeout=0.3)
    assert (done.code, done.of(0)) == (7, ["asked"])


def end_of(rank: int, when: float, status: int, summary: str = "") -> RankEnd:
    report = FailureReport(summary, "", FailureRole.CAUSE, False, None) if summary else None
    return RankEnd(rank, 1, when, status, report)


def test_a_rank_that_lost_its_peer_is_not_the_first() -> None:
    lost = "torch.distributed.DistBackendError: [gloo/transport/tcp] Connection closed by peer"
    echo, killed = end_of(0, 1.0, 1, lost), end_of(1, 1.01, -9)
    assert first_failure([echo, killed, end_of(2, 0.5, 0)]) is killed
    assert first_failure([echo, end_of(1, 2.5, -9)]) is echo  # much later: of its own
    assert first_failure([echo, end_of(3, 1.5, 1, "ValueError: x")]).rank == 3
    unknown = RankEnd(0, 1, 0.0, None)
    assert (unknown.exit_code, unknown.how) == (1, "was lost with the fork server")


def test_the_documented_calls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE'])")
    code = paceline.launch_distributed_training(script, "a", nproc_per_node=2, script_args=("--lr", 0.1))
    assert code == 0
    assert "[rank 1] ['a', '--lr', '0.1'] 2\n" in capfd.readouterr().out
    assert paceline.DistributedLauncher(LaunchConfig(nproc_per_node=1)).launch(str(script), "b") == 0
    assert paceline.DistributedLauncher().launch(script) == 0


def test_a_launcher_in_a_thread_leaves_signals_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, "print('fine')")
    codes: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: codes.append(paceline.DistributedLauncher().launch(script)))
    thread.start()
    thread.join()
    assert codes == [0]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_free_port_is_of_the_range_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 20000 <= free_port() < 29500
    port, _ = free_range(1)
    monkeypatch.setenv("PACELINE_PORTS", f"{port}-{port}")
    assert free_port() == port


WAITING = """
    import os, signal, sys, threading
    if sys.argv[2] == "handles":
        def save(number, frame):
            print("saved on", signal.Signals(number).name, flush=True)
            sys.exit(75)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, save)
    open(f"{sys.argv[1]}/{os.environ['RANK']}-{os.getpid()}", "w").close()
    threading.Event().wait()
"""


def ranks_of(folder: Path) -> list[int]:
    """The processes of both ranks, once they are there."""
    wait_for(lambda: len(list(folder.iterdir())) == 2)
    return [int(path.name.partition("-")[2]) for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("sent", "how", "code", "printed"),
    [
        (signal.SIGTERM, "handles", 75, ["saved on SIGTERM"]),
        (signal.SIGUSR1, "handles", 75, ["saved on SIGUSR1"]),
        (signal.SIGINT, "plain", 130, []),
        (signal.SIGUSR1, "plain", 128 + signal.SIGUSR1, []),
    ],
)
def test_a_signal_goes_to_the_ranks_and_their_code_is_the_launchers(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    sent: signal.Signals,
    how: str,
    code: int,
    printed: list[str],
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    script = write(tmp_path, WAITING)

    def send() -> None:
        ranks_of(there)
        os.kill(os.getpid(), sent)

    # A shell without job control starts what it leaves in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        done = launched(capfd, script, there, how, nproc_per_node=2)
    finally:
        signal.signal(signal.SIGINT, before)
    sender.join()
    assert done.code == code, done.err
    for rank in range(2):
        assert done.of(rank) == printed
    assert not [line for line in done.said if "again (" in line]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    script = write(tmp_path, WAITING)
    words = ["run", str(script), "--nproc-per-node", "2", str(there), "plain"]
    with subprocess.Popen([sys.executable, "-m", "paceline", *words]) as process:
        try:
            pids = ranks_of(there)
            # Only the ranks have torch.
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
            assert "libtorch" in Path(f"/proc/{pids[0]}/maps").read_text()
            with watch(pids) as ranks:
                assert len(ranks) == 2
                process.kill()
                assert all_gone(ranks, 30)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("paceline", ["run", "none.py"], "error: the script none.py cannot be read: No such file"),
        ("paceline.launcher", ["none.py"], "error: the script none.py cannot be read: No such file"),
        ("paceline.launcher", ["--nproc-per-node", "0", "t.py"], "error: nproc_per_node=0"),
        ("paceline.cli.main", ["run"], ""),
    ],
)
def test_mistakes_on_the_command_line_have_code_2(program: str, words: list[str], said: str) -> None:
    if program == "paceline.cli.main":
        assert main.invoke(main.app, words) == 2
        return
    done = subprocess.run([sys.executable, "-m", program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert "\n  try: " in done.stderr
