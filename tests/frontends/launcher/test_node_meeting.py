"""Launchers of several nodes, on this machine: they meet, name who is missing, start again together, and end
with one code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.free_ports import free_range
from tests.frontends.launcher.launched import write

from paceline import DistributedLauncher, LaunchConfig, PacelineError, RendezvousError
from paceline.comm.rendezvous.key_value_store import StoreClient
from paceline.core.listen_address import listener
from paceline.frontends.launcher.master_port import free_port
from paceline.frontends.launcher.node_meeting import NodeFailure, NodeMeeting


def on_nodes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns or raises on each node, all at the same time."""
    results: list[Any] = [None] * count

    def run(node: int) -> None:
        try:
            results[node] = work(node)
        except PacelineError as error:
            results[node] = error

    threads = [threading.Thread(target=run, args=(node,)) for node in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def config(node: int, port: int, **changes: Any) -> LaunchConfig:
    settings: dict[str, Any] = {"nproc_per_node": 1, "nnodes": 2, "node_rank": node, "master_port": port}
    return LaunchConfig(**{**settings, "start_timeout": 30.0, "monitor_interval": 0.1, **changes})


def launch(folder: Path, source: str, ranks: tuple[int, ...] = (1, 2), **changes: Any) -> list[Any]:
    script = write(folder, source)
    (port, _) = free_range(1)

    def start(node: int) -> int:
        chosen = config(node, port, nnodes=len(ranks), nproc_per_node=ranks[node], **changes)
        return DistributedLauncher(chosen).launch(script)

    return on_nodes(len(ranks), start)


DDP = """
    import os, torch, torch.distributed as dist
    count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if count == "0" and rank == "1":
        os._exit(4)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    print("start", count, "sum", int(total), *(os.environ[name] for name in names))
    dist.destroy_process_group()
"""


def test_a_failure_on_one_node_starts_the_ranks_of_all_nodes_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, DDP) == [0, 0]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "[rank 0] start 1 sum 3 0 0 1 2",
        "[rank 1] start 1 sum 3 0 1 2 2",
        "[rank 2] start 1 sum 3 1 1 2 2",
    ]
    assert err.count("all 3 ranks start again (restart 1 of 3)") == 2
    # Its own node says more, the other one who it was.
    assert "rank 1 of 3 failed first (pid " in err
    assert "exited with code 4 on node 1\n" in err


def test_all_nodes_end_with_the_code_of_the_first_failing_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
        import os, sys, threading
        if os.environ["RANK"] == "0":
            sys.exit(6)
        threading.Event().wait()
    """
    assert launch(tmp_path, source, max_restarts=0) == [6, 6]
    assert "rank 0 of 3 failed first" in capfd.readouterr().err


def test_nodes_that_have_not_come_are_named() -> None:
    (port, _) = free_range(1)
    chosen = [config(node, port, nnodes=4, start_timeout=0.5) for node in range(4)]
    ended = threading.Event()

    def meet(number: int) -> None:
        node = (0, 2)[number]
        try:
            NodeMeeting(chosen[node], free_port, lambda: None)
        finally:
            ended.set()

    first, second = on_nodes(2, meet)
    assert isinstance(first, RendezvousError)
    assert f"nodes 1 and 3 of 4 have not come to 127.0.0.1:{port} within 0.5 s" in first.message
    assert "--node-rank 1" in first.remedy
    # Node 2 names them too, or finds the store gone.
    assert isinstance(second, PacelineError)


def test_a_node_without_node_0_says_where_it_waited() -> None:
    (port, _) = free_range(1)
    with pytest.raises(RendezvousError) as caught:
        NodeMeeting(config(1, port, start_timeout=0.3), free_port, lambda: None)
    assert f"node 0 has not come to 127.0.0.1:{port} within 0.3 s: " in caught.value.message
    assert "same --master-addr and --master-port" in caught.value.remedy


def test_a_port_that_is_taken_is_an_error_of_node_0() -> None:
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"node 0 cannot serve at 127\.0\.0\.1:{port}: Address already"
        ):
            NodeMeeting(config(0, port), free_port, lambda: None)


def met(count: int, **changes: Any) -> list[Any]:
    (port, _) = free_range(1)
    return on_nodes(
        count, lambda node: NodeMeeting(config(node, port, nnodes=count, **changes), free_port, lambda: None)
    )


def test_two_launchers_with_one_number_and_two_opinions_on_the_number_of_nodes() -> None:
    (port, _) = free_range(1)
    numbers = (0, 1, 1)
    results = on_nodes(3, lambda place: NodeMeeting(config(numbers[place], port), free_port, lambda: None))
    refused = [result for result in results if isinstance(result, PacelineError)]
    assert ["node 1 of the job at" in error.message for error in refused] == [True]
    for result in results:
        if isinstance(result, NodeMeeting):
            result.close()
    (port, _) = free_range(1)
    sizes = (2, 3)
    results = on_nodes(
        2,
        lambda node: NodeMeeting(
            config(node, port, nnodes=sizes[node], start_timeout=0.5), free_port, lambda: None
        ),
    )
    assert "node 1 expects 3 nodes, this one 2" in results[0].message


def test_a_lost_node_ends_the_job_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.frontends.launcher.node_meeting._LOST_SECONDS", 0.5)
    woken = threading.Event()
    (port, _) = free_range(1)
    first, second = on_nodes(
        2,
        lambda node: NodeMeeting(
            config(node, port, monitor_interval=0.05), free_port, woken.set if node == 0 else lambda: None
        ),
    )
    places = on_nodes(2, lambda node: (first, second)[node].begin(0))
    assert [(place.first_rank, place.world_size) for place in places] == [(0, 2), (1, 2)]
    second.close()  # without a word
    assert woken.wait(60)
    failure = first.failure
    assert (failure.node, failure.lost, failure.final) == (1, True, True)
    assert "is lost: there was no sign of life of its launcher for 0.5 s" in failure.what
    with pytest.raises(PacelineError, match="is lost"):
        first.await_end(0)
    first.close()


def test_node_0_that_is_gone_is_noticed() -> None:
    woken = threading.Event()
    (port, _) = free_range(1)
    first, second = on_nodes(
        2,
        lambda node: NodeMeeting(
            config(node, port, monitor_interval=0.05), free_port, woken.set if node else lambda: None
        ),
    )
    first.close()
    assert woken.wait(60)
    assert "node 0" in second.failure.what
    with pytest.raises(PacelineError):
        second.begin(0)
    second.close()


@pytest.mark.parametrize("echoes", [(False, False), (True, False), (False, True), (True, True)])
def test_one_failure_counts_on_all_nodes_and_an_echo_only_where_there_is_no_other(
    echoes: tuple[bool, bool],
) -> None:
    meetings = met(2)
    on_nodes(2, lambda node: meetings[node].begin(0))
    for node in (1, 0):
        meetings[node].fail(NodeFailure(node, node, 3 + node, "x", final=node == 0, echo=echoes[node]))
    on_nodes(2, lambda node: meetings[node].await_end(0))
    assert meetings[0].failure == meetings[1].failure
    assert (meetings[0].failure.node, meetings[0].failure.final) == (
        0 if echoes == (False, True) else 1,
        True,
    )
    assert (
        on_nodes(2, lambda node: meetings[node].finish(meetings[node].failure.exit_code))
        == [meetings[0].failure.exit_code] * 2
    )
    on_nodes(2, lambda node: meetings[node].close())


def test_what_a_watcher_reads_late_does_not_replace_the_root_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, came, woken = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
    get = StoreClient.get

    def late(client: StoreClient, key: str) -> bytes | None:
        value = get(client, key)
        if key == "failed/0" and threading.current_thread().name == "paceline-nodes":
            came.release()
            assert ended.wait(60)
        return value

    monkeypatch.setattr(StoreClient, "get", late)
    (port, _) = free_range(1)
    meetings = on_nodes(2, lambda node: NodeMeeting(config(node, port), free_port, woken.release))
    on_nodes(2, lambda node: meetings[node].begin(0))
    meetings[1].fail(NodeFailure(1, 1, 4, "echo", echo=True))
    meetings[0].fail(NodeFailure(0, 0, 3, "root"))
    assert all(came.acquire(timeout=60) for _ in meetings)
    on_nodes(2, lambda node: meetings[node].await_end(0))
    ended.set()
    assert all(woken.acquire(timeout=60) for _ in meetings)
    assert [meeting.failure.what for meeting in meetings] == ["root", "root"]
    on_nodes(2, lambda node: meetings[node].finish(3))
    on_nodes(2, lambda node: meetings[node].close())


def test_a_secret_on_one_node_only_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    (port, _) = free_range(1)
    result: list[Any] = []
    serving = threading.Thread(target=lambda: result.append(_refused(config(0, port, start_timeout=20.0))))
    serving.start()
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(secret))
    error = _refused(config(1, port, start_timeout=60.0))
    assert "secret" in str(error)
    monkeypatch.undo()
    other = NodeMeeting(config(1, port), free_port, lambda: None)  # and one without is not
    serving.join()
    result[0].close()
    other.close()


def _refused(chosen: LaunchConfig) -> Any:
    try:
        return NodeMeeting(chosen, free_port, lambda: None)
    except RendezvousError as error:
        return error
