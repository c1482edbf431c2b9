"""Where a rank finds its place: arguments, launchers' variables, and mistakes in them."""

from __future__ import annotations

import pytest

from paceline.comm.rendezvous.environment import (
    LOCAL_HOST,
    LOCAL_PORT,
    Address,
    chosen_backend,
    derived_port,
    find_launch_info,
    first_host,
    parse_address,
)
from paceline.core.errors import UsageError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[003-005],gpu1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-7",
}


def test_nothing_at_all_is_a_group_of_one() -> None:
    place = find_launch_info({})
    assert (place.world_size, place.rank, place.local_rank) == (1, 0, 0)


def test_arguments_alone_meet_at_the_local_default() -> None:
    place = find_launch_info({}, 4, 2)
    assert (place.world_size, place.rank) == (4, 2)
    assert place.address == Address(LOCAL_HOST, LOCAL_PORT)
    assert place.address.is_loopback


def test_arguments_win() -> None:
    place = find_launch_info(TORCHRUN, 2, 1, "10.0.0.1:5000")
    assert (place.world_size, place.rank, place.address) == (2, 1, Address("10.0.0.1", 5000))
    assert not place.agent_store


def test_torchrun() -> None:
    place = find_launch_info(TORCHRUN)
    assert (place.world_size, place.rank, place.local_rank) == (8, 3, 1)
    assert place.address == Address("node7", 29400)
    assert not place.agent_store


def test_the_store_of_torchruns_agent() -> None:
    agent = {
        **TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "a",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    place = find_launch_info(agent)
    assert place.agent_store
    assert place.attempt == "a/2"
    assert find_launch_info(agent | {"TORCHELASTIC_RESTART_COUNT": "3"}).attempt != place.attempt


def test_a_rank_without_a_master_is_local() -> None:
    assert find_launch_info({"RANK": "1", "WORLD_SIZE": "2"}).address == Address(LOCAL_HOST, LOCAL_PORT)


def test_slurm() -> None:
    place = find_launch_info(SLURM)
    assert (place.world_size, place.rank, place.local_rank) == (6, 5, 1)
    assert place.address == Address("node003", derived_port("4711.0"))
    assert find_launch_info({**SLURM, "SLURM_STEP_ID": "1"}).address.port != place.address.port


def test_slurm_with_a_master() -> None:
    assert find_launch_info({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).address == Address("a", 1)


def test_openmpi_on_one_host() -> None:
    place = find_launch_info(OPENMPI)
    assert (place.world_size, place.rank, place.local_rank) == (4, 2, 2)
    assert place.address == Address(LOCAL_HOST, derived_port("prterun-7"))


def test_openmpi_on_several_hosts_needs_a_master() -> None:
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        find_launch_info(several)
    assert find_launch_info({**several, "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}).address == Address(
        "n0", 29500
    )


def test_the_innermost_launcher_counts() -> None:
    assert find_launch_info(SLURM | OPENMPI).source == "OpenMPI"
    assert find_launch_info(SLURM | OPENMPI | TORCHRUN).source == "torchrun"


EXPORTED = {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "node003", "MASTER_PORT": "29400"}


def test_slurm_counts_where_a_batch_script_exported_a_rank_for_all_tasks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        place = find_launch_info(SLURM | EXPORTED)
        assert (place.rank, place.world_size, place.local_rank, place.source) == (5, 6, 1, "SLURM")
        assert place.address == Address("node003", 29400)
    (line,) = caplog.messages
    assert "RANK=0 is exported, and SLURM_PROCID says that this is task 5 of 6: SLURM's number counts" in line
    # Also where it exported nothing else.
    assert find_launch_info(SLURM | {"RANK": "1"}).rank == 5


@pytest.mark.parametrize(
    "inside",
    [
        {"RANK": "5"},  # no contradiction
        {"LOCAL_WORLD_SIZE": "6"},  # of spawn, in a task
        {"TORCHELASTIC_RUN_ID": "none"},  # of torchrun or `paceline run`, in a task
        {"WORLD_SIZE": "48"},  # of processes that each task starts
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "", "RANK": "3"},  # by hand, in the batch script itself
    ],
)
def test_ranks_inside_a_task_of_slurm_keep_their_number(
    inside: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environment = SLURM | EXPORTED | inside
    place = find_launch_info(environment)
    assert (place.rank, place.source) == (int(environment["RANK"]), "torchrun")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "missing", "example"),
    [("MASTER_ADDR", "MASTER_PORT", "29500"), ("MASTER_PORT", "MASTER_ADDR", "host of rank 0")],
)
def test_half_of_the_meeting_point_is_explained(given: str, missing: str, example: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", given: "77"}
    with pytest.raises(UsageError) as caught:
        find_launch_info(environment)
    assert f"{missing} is not set although {given}=77 is: the ranks meet at both" in caught.value.message
    assert f"export {missing}={example}" in caught.value.remedy
    assert f"unset {given}" in caught.value.remedy


def test_a_launcher_chooses_the_backend_of_groups_that_ask_for_none() -> None:
    assert chosen_backend({"PACELINE_BACKEND": "gloo"}, "auto") == "gloo"
    assert chosen_backend({"PACELINE_BACKEND": "gloo"}, "shm") == "shm"
    assert chosen_backend({}, "auto") == "auto"


def test_arguments_that_repeat_the_launcher_keep_its_address() -> None:
    assert find_launch_info(SLURM, 6, 5).address.host == "node003"
    assert find_launch_info(SLURM, 2, 1).address.host == LOCAL_HOST


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x'"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "99999"),
        ({**TORCHRUN, "LOCAL_RANK": "two"}, "LOCAL_RANK"),
        ({**SLURM, "SLURM_PROCID": ""}, "SLURM_PROCID"),
        ({**SLURM, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
        ({**SLURM, "SLURM_JOB_NODELIST": "a[1-"}, "node list"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_half_set_variables_are_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_launch_info(environment)
    assert named in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(("world_size", "rank", "missing"), [(4, None, "rank"), (None, 1, "world_size")])
def test_half_given_arguments(world_size: int | None, rank: int | None, missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        find_launch_info({}, world_size, rank)


def test_one_argument_and_a_launcher() -> None:
    place = find_launch_info({"RANK": "1"}, world_size=2)
    assert (place.world_size, place.rank) == (2, 1)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a:1", Address("a", 1)),
        ("tcp://10.0.0.1:29500", Address("10.0.0.1", 29500)),
        ("[::1]:80", Address("::1", 80)),
        ("tcp://[fe80::1%eth0]:80/", Address("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:70000", "a b:1", "http://x:80", "::1:80"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("n[001-004,7],gpu3", "n001"),
        ("n[7,9]", "n7"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("a-b-[12-15].cluster", "a-b-12.cluster"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_derived_ports_are_ordinary_and_differ() -> None:
    ports = {derived_port(str(job)) for job in range(200)}
    assert len(ports) > 190
    assert all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("127.example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert Address(host, 1).is_loopback is loopback


KUBERNETES = {"WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}


def test_a_pod_of_an_indexed_job_knows_its_rank():
    place = find_launch_info({**KUBERNETES, "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"})
    assert (place.world_size, place.rank, place.source) == (4, 3, "Kubernetes")
    assert place.address == Address("train-0.train", 29500)


def test_a_pod_of_a_stateful_set_has_its_rank_at_the_end_of_its_name():
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "llm-gpu-2"}
    assert find_launch_info({**KUBERNETES, **inside}).rank == 2
    # Outside of a cluster a host's name says nothing.
    with pytest.raises(UsageError, match="RANK is not set"):
        find_launch_info({**KUBERNETES, "HOSTNAME": "llm-gpu-2"})


def test_a_rank_that_the_manifest_gives_counts():
    given = {**KUBERNETES, "JOB_COMPLETION_INDEX": "1", "RANK": "2"}
    assert find_launch_info(given).rank == 2


def test_a_pod_without_world_size_is_alone():
    """`paceline train` in a pod of an Indexed Job has workers of its own."""
    assert find_launch_info({"JOB_COMPLETION_INDEX": "3"}).world_size == 1


def test_a_pod_that_does_not_know_pod_0_is_told_how_it_would():
    with pytest.raises(UsageError, match=r"JOB-0\.SERVICE"):
        find_launch_info({"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "3"})


def test_an_index_beyond_the_world_is_refused():
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX=4 with WORLD_SIZE=4"):
        find_launch_info({**KUBERNETES, "JOB_COMPLETION_INDEX": "4"})
