"""Sums between hosts over Paceline's authenticated connections, against Gloo, which authenticates nothing.

Hosts are network namespaces, unshaped and with links of 1 Gbit/s. Every round measures every method once,
the slowest rank counts, medians and the range from the first to the third quartile are shown. The processor
time is that of all ranks together: on a busy machine it says more than the time by the clock. "Gloo, same
messages" is what the sum in canonical order needs (every rank gets all partials of its slice, folds and
shares them) over torch.distributed's isend and irecv.

    python -m bench.links                        all of it
    python -m bench.links --sizes 25 --hosts 2   a part
    python -m bench.links --before OTHER/src     also another checkout of Paceline, in turns with this one
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from bench.hosts import run_on_hosts
from bench.report import Report, Target
from paceline.comm.context import DistributedContext

SIZES = (1, 25, 100)
HOSTS = (2, 4)
RATES = ("1gbit", None)
MASTER = "10.77.0.1"
GLOO, FOLD, CHECKED, RING = "Gloo all-reduce", "fold_partials", "fold_partials, checksums", "ring"
BY_HAND = "Gloo, same messages"


Sample = tuple[float, float]
"""Seconds by the clock, and of the processor."""


def measure(ctx: DistributedContext, megabytes: int, rounds: int, gloo: bool) -> dict[str, list[Sample]]:
    """What every round took on this rank, by method."""
    from paceline.comm.collectives.shard_sums import ShardOwnership

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(ctx.rank)
    data = torch.randn((megabytes << 20) // 4, generator=generator)
    out = torch.empty_like(data)
    holdings = ShardOwnership(ctx.world_size, tuple((rank,) for rank in range(ctx.world_size)))
    actions: dict[str, Callable[[], object]] = {
        FOLD: lambda: ctx.fold_partials([data], holdings, out),
        CHECKED: lambda: ctx.fold_partials([data], holdings, out, checksum=True),
        RING: lambda: ctx.all_reduce(data, algorithm="ring", out=out),
    }
    if gloo:
        store = TCPStore(MASTER, 29544, is_master=ctx.is_master, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
        plain = torch.zeros_like(data)
        actions[GLOO] = lambda: dist.all_reduce(plain)
        actions[BY_HAND] = lambda: _by_hand(ctx.rank, ctx.world_size, data, out)
    samples: dict[str, list[Sample]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            ctx.barrier()
            start, used = time.perf_counter(), time.process_time()
            action()
            end = time.perf_counter()
            ctx.barrier()  # threads of this rank may still send what the slowest one waits for
            if turn:
                samples[name].append((end - start, time.process_time() - used))
    if gloo:
        dist.destroy_process_group()
        ctx.barrier()
    return samples


def _by_hand(rank: int, size: int, data: Tensor, out: Tensor) -> None:
    """The messages of the canonical sum, and a fold, over Gloo."""
    slices = list(torch.tensor_split(data, size))
    results = list(torch.tensor_split(out, size))
    peers = [peer for peer in range(size) if peer != rank]
    arrived = {peer: torch.empty_like(slices[rank]) for peer in peers}
    _exchange({peer: slices[peer] for peer in peers}, arrived)
    results[rank].copy_(slices[rank])
    for peer in peers:
        results[rank].add_(arrived[peer])
    _exchange(dict.fromkeys(peers, results[rank]), {peer: results[peer] for peer in peers})


def _exchange(sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    works = [dist.irecv(tensor, peer) for peer, tensor in receives.items()]
    works += [dist.isend(tensor, peer) for peer, tensor in sends.items()]
    for work in works:
        if work is not None:
            work.wait()


def run(
    sizes: Sequence[int] = SIZES,
    hosts: Sequence[int] = HOSTS,
    rates: Sequence[str | None] = RATES,
    rounds: int = 7,
    before: str = "",
) -> Report:
    report = Report(
        "links",
        "Sums between hosts, authenticated, against Gloo",
        (
            "link",
            "hosts",
            "MB",
            "method",
            "median ms",
            "quartiles ms",
            "over Gloo all-reduce",
            "processor ms",
        ),
    )
    for rate in rates:
        for count in hosts:
            for megabytes in sizes:
                found = _samples(count, megabytes, rate, rounds, before)
                base = statistics.median(seconds for seconds, _ in found[GLOO])
                for name, both in found.items():
                    samples = [seconds for seconds, _ in both]
                    middle = statistics.median(samples)
                    low, _, high = statistics.quantiles(samples, n=4)
                    report.rows.append(
                        (
                            rate or "unshaped",
                            str(count),
                            str(megabytes),
                            name,
                            f"{middle * 1e3:.1f}",
                            f"{low * 1e3:.1f} - {high * 1e3:.1f}",
                            f"{middle / base:.2f}x",
                            f"{statistics.median(used for _, used in both) * 1e3:.1f}",
                        )
                    )
                    if name == FOLD and rate == "1gbit" and megabytes >= 25:
                        what = (
                            f"fold_partials, {count} hosts, {megabytes} MB, 1 Gbit/s, over Gloo's all-reduce"
                        )
                        report.targets.append(Target(what, middle / base, 1.25, at_least=False))
    return report


def _samples(
    hosts: int, megabytes: int, rate: str | None, rounds: int, before: str
) -> dict[str, list[Sample]]:
    """Seconds of the slowest rank and processor time of all, by method; a few rounds at a time where another
    checkout has its turns."""
    found: dict[str, list[Sample]] = {}
    turns = 3 if before else 1
    for _ in range(turns):
        for source in ("", before) if before else ("",):
            outcome = run_on_hosts(
                measure,
                megabytes,
                -(-rounds // turns),
                not source,
                hosts=hosts,
                rate=rate,
                environment={"PYTHONPATH": source} if source else None,
            )
            for name in outcome.by_host[0][0]:
                ranks = [ranks[0][name] for ranks in outcome.by_host]
                rounds_of_all = [
                    (max(seconds for seconds, _ in one), sum(used for _, used in one))
                    for one in zip(*ranks, strict=True)
                ]
                found.setdefault(f"{name}, before" if source else name, []).extend(rounds_of_all)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="MB")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS))
    parser.add_argument("--rates", nargs="+", default=["1gbit", "unshaped"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", default="", metavar="SRC", help="the src folder of another checkout")
    given = parser.parse_args()
    rates = [None if rate == "unshaped" else rate for rate in given.rates]
    report = run(given.sizes, given.hosts, rates, given.rounds, given.before)
    report.show()
    report.save()


if __name__ == "__main__":
    main()
