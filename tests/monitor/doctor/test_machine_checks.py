"""Judgements of `paceline doctor` about a machine: pure functions of what was found there."""

from __future__ import annotations

import pytest

from paceline.core.available_resources import visible_gpus
from paceline.monitor.doctor import machine_checks as checks
from paceline.monitor.doctor.folder_check import file_system, judge_folder, look_at_folder

GIB = 1 << 30


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (checks.check_python((3, 11, 0)), "ok", "3.11.0"),
        (checks.check_python((3, 10, 9)), "wrong", "3.11 or later"),
        (checks.check_torch("2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (checks.check_torch("2.9.1"), "wrong", "too old"),
        (checks.check_torch(None, "libcudart.so.13: not found"), "wrong", "libcudart.so.13: not found"),
        (checks.check_gpus(0, [], None), "ok", "workers compute on the CPU"),
        (checks.check_gpus(2, ["H200", "H200"], "13.0"), "ok", "2 GPUs: H200"),
        (checks.check_gpus(1, [], None), "wrong", "1 GPU is there and torch cannot use them: it was built"),
        (checks.check_gpus(2, [], "13.0"), "wrong", "2 GPUs are there and torch cannot use them (built for"),
        (checks.check_nccl("2.28.3", 1), "ok", "2.28.3"),
        (checks.check_nccl(None, 0), "ok", "not needed"),
        (checks.check_nccl(None, 1), "wrong", "torch has none"),
        (checks.check_socket_interface(None, ["lo", "eth0", "docker0"], 0), "ok", "not needed without a GPU"),
        (checks.check_socket_interface(None, ["lo", "eth0"], 1), "ok", "takes eth0, the only one"),
        (checks.check_socket_interface("", ["lo", "eth0", "docker0"], 1), "warning", "eth0, docker0"),
        (checks.check_socket_interface("eth", ["lo", "eth0", "eth1"], 1), "ok", "takes eth0, eth1"),
        (checks.check_socket_interface("=eth", ["lo", "eth0"], 1), "wrong", "no interface of this machine"),
        (checks.check_socket_interface("^docker,lo", ["lo", "eth0", "docker0"], 1), "ok", "takes eth0"),
        (checks.check_socket_interface("ib0", ["lo", "eth0"], 0), "wrong", "it has lo, eth0"),
        (checks.check_debug_level(None), "ok", "WARN shows why"),
        (checks.check_debug_level("info"), "ok", "and more"),
        (checks.check_debug_level("loud"), "warning", "stays silent"),
        (checks.check_infiniband(None, []), "ok", "takes sockets"),
        (checks.check_infiniband("0", ["mlx5_0"]), "ok", "takes InfiniBand (mlx5_0)"),
        (checks.check_infiniband("1", ["mlx5_0"]), "warning", "takes slower sockets"),
        (checks.check_infiniband("1", []), "ok", "there is none"),
        (checks.check_shared_memory(None, None), "warning", "no /dev/shm"),
        (checks.check_shared_memory(64 << 20, 64 << 20), "warning", "too little for DataLoader"),
        (checks.check_shared_memory(8 * GIB, 8 * GIB), "ok", "8.00 of 8.00 GiB"),
        (checks.check_memory(GIB // 2, 1), "warning", "1 core, 0.5 GiB"),
        (checks.check_memory(4 * GIB, 2), "ok", "2 cores, 4.0 GiB"),
        (judge_folder("/a", "ext4", 5 * GIB, 0.01), "ok", "(ext4): a file was durable in 10 ms; 5 GiB free"),
        (judge_folder("/a", "ext4", 5 * GIB, 0.5), "warning", "which is slow"),
        (judge_folder("/a", "ext4", GIB // 4, 0.01), "warning", "only 0.25 GiB free"),
        (judge_folder("/a", "tmpfs", 5 * GIB, 0.01), "warning", "is in memory (tmpfs)"),
    ],
)
def test_a_judgement(found, verdict, said):
    assert found.verdict == verdict
    assert said in f"{found.text} {found.remedy}"
    assert bool(found.remedy) == (verdict != "ok")


def test_limits():
    def verdicts(*limits: int | None) -> dict[str, str]:
        return {found.topic: found.verdict for found in checks.check_limits(*limits)}

    assert verdicts(None, None, None) == {"open files": "ok"}
    assert verdicts(256, 8 * GIB, 100) == {
        "open files": "warning", "address space": "wrong", "processes": "warning",
    }  # fmt: skip


def test_this_machine_is_looked_at():
    found = {one.topic: one for one in checks.look_at_machine({"NCCL_SOCKET_IFNAME": "nosuch0"})}
    assert found["python"].verdict == "ok"
    assert found["torch"].verdict == "ok"
    assert found["NCCL_SOCKET_IFNAME"].verdict == "wrong"
    assert {"gpus", "nccl", "NCCL_DEBUG", "NCCL_IB_DISABLE", "processor", "shared memory"} <= found.keys()


def test_gpus_are_counted_without_a_driver(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, tmp_path) == 2


def test_a_folder_is_written_flushed_read_back_and_left_as_it_was(tmp_path):
    (found,) = look_at_folder(str(tmp_path / "a" / "b"))
    assert found.verdict in ("ok", "warning")
    assert "durable" in found.text or "memory" in found.text
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    (found,) = look_at_folder(str(tmp_path / "file" / "b"))
    assert found.verdict == "wrong"
    assert "cannot be written: Not a directory" in found.text
    (found,) = look_at_folder("memory://doctor/checkpoints")
    assert found.verdict == "ok"
    assert "written, read back and deleted" in found.text
    (found,) = look_at_folder("nosuch://bucket/run")
    assert found.verdict == "wrong"
    assert found.remedy


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:5 / {tmp_path} rw shared:2 - xfs none rw\n"
        f"3 2 0:6 / {tmp_path}/deep rw - nfs4 server:/ rw\n"
        "broken line\n"
    )
    assert file_system(tmp_path / "shallow", mounts) == "xfs"
    assert file_system(tmp_path / "deep" / "er", mounts) == "nfs4"
    assert file_system(tmp_path / "deeper", mounts) == "xfs"
    assert file_system(tmp_path, tmp_path / "missing") == ""
