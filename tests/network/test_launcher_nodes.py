"""Launchers on two hosts: a plain DDP script over real interfaces, its restart, a host that does not come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frontends.launcher.launched import write

from paceline.testing import netns
from paceline.testing.netns import Hosts

_WHY_NOT = netns.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "namespaces work"),
]

DDP = """
    import os, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        if step == 1 and dist.get_rank() == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", int(total), os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.destroy_process_group()
"""


def start(hosts: Hosts, node: int, script: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "run", str(script), "--nproc-per-node", "2", "--nnodes", "2"]
    place = ["--node-rank", str(node), "--master-addr", hosts.addresses[0], "--master-port", "29500"]
    return hosts.start(
        node,
        [*command, *place, *words],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},  # the name of this machine is the loopback's
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_hosts_train_together_and_start_again_together(tmp_path: Path) -> None:
    script = write(tmp_path, DDP)
    with Hosts(2) as hosts:
        launchers = [start(hosts, node, script) for node in range(2)]
        ended = [launcher.communicate(timeout=200) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], ended
        for node, (out, err) in enumerate(ended):
            for rank in (2 * node, 2 * node + 1):
                assert f"[rank {rank}] sum 4 {hosts.addresses[0]} 1\n" in out
            assert "all 4 ranks start again (restart 1 of 3)" in err
        assert "rank 3 of 4 failed first" in ended[1][1]


def test_a_host_that_does_not_come_is_named(tmp_path: Path) -> None:
    script = write(tmp_path, DDP)
    with Hosts(2) as hosts:
        hosts.cut(1)
        launchers = [start(hosts, node, script, "--start-timeout", "3") for node in range(2)]
        ended = [launcher.communicate(timeout=100)[1] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [1, 1], ended
        assert f"node 1 of 2 has not come to {hosts.addresses[0]}:29500 within 3 s" in ended[0]
        assert f"node 0 has not come to {hosts.addresses[0]}:29500 within 3 s" in ended[1]
