"""Scripts that use a Trainer under the launcher: one run for all ranks, repaired in place whatever is lost,
with the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.gated_run import Gates
from tests.frontends.launcher.launched import Launched, launched, write
from tests.train.small_run import STEPS, fit, journal_of, settings, steps_of
from tests.waiting import wait_for

import paceline
from paceline.core import events

TRAINS = """
    import os, sys
    from pathlib import Path
    import paceline
    from tests.frontends.gated_run import Gates
    from tests.train.small_run import data, settings, trainer

    folder, gates = Path(sys.argv[1]), Path(sys.argv[2])
    (gates / f"script-{os.environ['RANK']}-{os.getpid()}").touch()
    config = settings(folder, **eval(sys.argv[4]))
    trained = trainer(config, [Gates(gates, eval(sys.argv[3]))])
    history = trained.fit(data(), data())
    print(history.state_hash, paceline.state_hash(trained.model), len(history.steps))
    print(trained.evaluate(data())["loss"], trained.predict(data()).sum().item(), history.workers)
"""


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("quiet")
    off = paceline.FaultTolerance(enabled=False)
    return fit(settings(folder / "run", 1, fault_tolerance=off), [Gates(folder, [])]).state_hash


def train(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, ranks: int, steps: str = "[]", changes: str = "{}"
) -> Launched:
    gates = tmp_path / "gates"
    gates.mkdir(exist_ok=True)
    script = write(tmp_path, TRAINS)
    return launched(capfd, script, tmp_path / "run", gates, steps, changes, nproc_per_node=ranks)


def check(
    done: Launched, quiet: str, ranks: int, steps: int | None = STEPS, workers: int | None = None
) -> None:
    assert done.code == 0, done.err
    for rank in range(ranks):
        hashes, after = done.of(rank)
        assert hashes.startswith(f"{quiet} {quiet} {'' if steps is None else steps}"), done.out
        assert after == done.of(0)[1]
        assert after.endswith(f" {workers or ranks}")


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Act beside the block, in another thread."""
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (3, 3)])  # a lone rank has its config's
def test_all_ranks_have_the_result_of_one_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str, ranks: int, workers: int
) -> None:
    done = train(capfd, tmp_path, ranks)
    check(done, quiet, ranks, workers=workers)
    assert done.said == []
    started = [event for event in journal_of(tmp_path / "run") if isinstance(event, events.RunStarted)]
    assert [event.workers for event in started] == [workers]


def test_a_lost_worker_is_repaired_in_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str
) -> None:
    chaos = '{"fault_tolerance": paceline.FaultTolerance(chaos="kill rank=1 step=7")}'
    done = train(capfd, tmp_path, 2, changes=chaos)
    check(done, quiet, 2)
    assert not [line for line in done.said if "paceline run" in line]
    assert (
        len([event for event in journal_of(tmp_path / "run") if isinstance(event, events.WorkerFailed)]) == 1
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_is_started_again_alone_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str, victim: int
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    pids: list[int] = []

    def kill() -> None:
        wait_for(lambda: len(list(gates.glob("at-6-*"))) == 2)
        (script,) = gates.glob(f"script-{victim}-*")
        pids.append(int(script.name.rpartition("-")[2]))
        os.kill(pids[0], signal.SIGKILL)
        (gates / "open-6").touch()

    with meanwhile(kill):
        done = train(capfd, tmp_path, 2, steps="[6]")
    # The successor of rank 0 goes on with a run that its workers have saved: its history begins there.
    check(done, quiet, 2, steps=STEPS if victim else None)
    said = "\n".join(line for line in done.said if "paceline run" in line)
    assert said.count("\n") == 0, done.err
    assert f"rank {victim} (pid {pids[0]}) was killed by signal 9 (SIGKILL); it starts again alone" in said
    # The other rank's script ran once.
    assert len(list(gates.glob(f"script-{1 - victim}-*"))) == 1
    assert len(list(gates.glob(f"script-{victim}-*"))) == 2
    assert sorted(set(steps_of(tmp_path / "run"))) == list(range(1, STEPS + 1))


ENDS_BEFORE_ITS_CALL = """
    if os.environ["RANK"] == "1" and not (gates / "open-6").exists():
        wait_for((gates / "at-6-0").exists)  # rank 0 has made the call for both
        (gates / "open-6").touch()
        {end}
    config ="""


def train_with_an_end_before_the_call(
    capfd: pytest.CaptureFixture[str], folder: Path, end: str, **settings: Any
) -> Launched:
    source = TRAINS.replace("import paceline\n", "import paceline\n    from tests.waiting import wait_for\n")
    script = write(folder, source.replace("\n    config =", ENDS_BEFORE_ITS_CALL.format(end=end)))
    (folder / "gates").mkdir()
    return launched(
        capfd, script, folder / "run", folder / "gates", "[6]", "{}", nproc_per_node=2, **settings
    )


def test_a_rank_that_is_lost_before_its_call_is_started_again_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str
) -> None:
    done = train_with_an_end_before_the_call(capfd, tmp_path, "os.kill(os.getpid(), 9)")
    check(done, quiet, 2)
    (said,) = [line for line in done.said if "paceline run" in line]
    assert "rank 1" in said
    assert "it starts again alone (1 of 3)" in said
    assert len(list((tmp_path / "gates").glob("script-0-*"))) == 1


def test_ranks_that_start_again_go_on_with_the_run_that_their_predecessors_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str
) -> None:
    done = train_with_an_end_before_the_call(capfd, tmp_path, "raise OSError('no such host')", max_restarts=1)
    check(done, quiet, 2, steps=None)
    assert any("raised OSError: no such host" in line for line in done.said)
    assert any("all 2 ranks start again (restart 1 of 1)" in line for line in done.said)
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))  # continued: no step was computed again


def test_an_error_of_the_run_is_every_ranks_and_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = train(capfd, tmp_path, 2, changes='{"global_batch": 3, "shards": 4}')
    assert done.code == 1
    assert "failed first" in done.said[0]
    assert not [line for line in done.said if "start again" in line]


def test_without_fault_tolerance_the_ranks_train_themselves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str
) -> None:
    off = '{"fault_tolerance": paceline.FaultTolerance(enabled=False)}'
    done = train(capfd, tmp_path, 2, changes=off)
    check(done, quiet, 2)


def test_a_group_of_the_script_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str], quiet: str) -> None:
    script = write(
        tmp_path, TRAINS.replace("folder, gates =", "paceline.init_process_group()\n    folder, gates =")
    )
    (tmp_path / "gates").mkdir()
    done = launched(capfd, script, tmp_path / "run", tmp_path / "gates", "[]", "{}", nproc_per_node=2)
    check(done, quiet, 2)


def test_survivors_that_go_on_by_themselves_are_let_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        """
        import os, signal, sys, threading
        from paceline.frontends.launcher_link import keep_survivors
        assert keep_survivors()
        told = sys.argv[1]
        if os.environ["RANK"] == "1":
            while not os.path.exists(told):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), 9)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        open(told, "w").close()
        assert signal.sigtimedwait([signal.SIGTERM], 0.5) is None
        print("went on")
        """,
    )
    done = launched(capfd, script, tmp_path / "told", nproc_per_node=2)
    assert (done.code, done.of(0), done.said) == (0, ["went on"], [])


@pytest.mark.parametrize("told", ["needed=[1]", "one_of=[1]"])
def test_ranks_do_not_go_on_without_those_that_they_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], told: str
) -> None:
    script = write(
        tmp_path,
        f"""
        import os, signal, sys
        from paceline.frontends.launcher_link import keep_survivors, losses_before_restart
        print([(one.rank, one.how) for one in losses_before_restart()])
        assert keep_survivors({told})
        again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1" and not again:
            os.kill(os.getpid(), 9)
        if not again:
            signal.pause()
        """,
    )
    done = launched(capfd, script, nproc_per_node=2, max_restarts=1)
    assert done.code == 0, done.err
    lost = "[(1, 'was killed by signal 9 (SIGKILL)')]"
    assert (done.of(0), done.of(1)) == (["[]", lost], ["[]", lost])
    assert any("rank 1 of 2 failed first" in line for line in done.said)
