"""What travels, counted: bytes of the ring, rounds of the tree, bytes between hosts of the hierarchical
all-reduce.

The last in two network namespaces that stand for two hosts with two ranks each; the interface's own counter
is shown beside Paceline's.
"""

from __future__ import annotations

import math

import torch

from bench.hosts import run_on_hosts
from bench.report import Report, Target, main
from paceline.comm.context import DistributedContext
from paceline.frontends.spawn import spawn

NBYTES = 24 << 20  # divides by 2, 3, 4 and 8
RANKS = (2, 3, 4, 8)


def counted(ctx: DistributedContext, algorithm: str) -> dict[str, int]:
    """One all-reduce of NBYTES: this rank's counters."""
    ctx.enable_profiling()
    ctx.all_reduce(torch.zeros(NBYTES // 4), algorithm=algorithm)
    tally: dict[str, int] = ctx.get_communication_stats()["operations"]["all_reduce"][algorithm]
    return tally


def run() -> Report:
    """Bytes and rounds against the theory."""
    report = Report(
        "counts", f"An all-reduce of {NBYTES} bytes, counted", ("algorithm", "where", "counted", "theory")
    )
    for ranks in RANKS:
        expected = 2 * (ranks - 1) * NBYTES // ranks
        tallies = spawn(counted, "ring", workers=ranks, threads=1)
        sent = {tally["bytes_sent"] for tally in tallies}
        headers = {tally["header_bytes"] for tally in tallies}
        counted_text = f"{_text(sent)} bytes per rank + {_text(headers)} of headers"
        report.rows.append(("ring", f"{ranks} ranks", counted_text, f"{expected} + {32 * 2 * (ranks - 1)}"))
        wrong = max(abs(bytes_sent - expected) for bytes_sent in sent)
        report.targets.append(Target(f"ring, {ranks} ranks, bytes off", wrong, 0, at_least=False, unit=""))
    for ranks in (2, 4, 8):
        rounds = {tally["rounds"] for tally in spawn(counted, "tree", workers=ranks, threads=1)}
        theory = 2 * math.log2(ranks)
        report.rows.append(("tree", f"{ranks} ranks", f"{_text(rounds)} rounds", f"{theory:g}"))
        report.targets.append(
            Target(f"tree, {ranks} ranks, rounds", max(rounds), theory, at_least=False, unit="")
        )
    for algorithm in ("hierarchical", "ring"):
        outcome = run_on_hosts(counted, algorithm, hosts=2, ranks_per_host=2)
        for host, ranks_of_host in enumerate(outcome.by_host):
            between = sum(tally["bytes_between_hosts"] for tally in ranks_of_host)
            text = f"{between} bytes left the host; its interface sent {outcome.sent_bytes[host]}"
            theory_bytes = NBYTES if algorithm == "hierarchical" else 3 * NBYTES // 2
            report.rows.append((algorithm, f"host {host} of 2, 2 ranks each", text, str(theory_bytes)))
            what = f"{algorithm}, host {host}, bytes between hosts over theory"
            report.targets.append(Target(what, between / theory_bytes, 1.0, at_least=False))
    return report


def _text(values: set[int]) -> str:
    return " or ".join(map(str, sorted(values)))


if __name__ == "__main__":
    main(run)
