"""A Ray cluster in a process of its own, which Ray leaves files and warnings in; a program of the tests:

    python -m tests.clusters.ray.cluster_process CLIENT_PORT DASHBOARD_PORT

Prints the head's address. Reads lines `add NAME` and `remove NAME`, and answers each with a line; with the end
of its input the cluster ends.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

CPUS = 4


def main(client_port: str, dashboard_port: str) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": dashboard_port != "0",
            "dashboard_port": int(dashboard_port) or None,
            "ray_client_server_port": int(client_port) or None,
        },
    )
    print(f"head {cluster.address}", flush=True)
    nodes: dict[str, Any] = {}
    try:
        for line in sys.stdin:
            command, name = line.split()
            if command == "add":
                nodes[name] = cluster.add_node(num_cpus=CPUS, env_vars={"PACELINE_HOST": name})
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print(f"done {name}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
