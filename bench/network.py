"""All-reduce between hosts on links of 1 Gbit/s: the ring against the line rate and Gloo, and what
compression saves.

Hosts are network namespaces with shaped links. Line rate: 2(N-1)/N of the message, both directions at once,
at 10^9 bit/s.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from bench.hosts import run_on_hosts
from bench.report import Report, Target, main
from paceline.comm.benchmark import interleaved
from paceline.comm.compression import cast_gradients, quantize_gradients, sparsify_gradients
from paceline.comm.compression.error_feedback import Compression
from paceline.comm.context import DistributedContext

NBYTES = 25 << 20
RATE = 1e9 / 8
COMPRESSIONS = {
    "ring": lambda: None,
    "ring, fp16": lambda: cast_gradients("fp16"),
    "ring, int8": lambda: quantize_gradients(8),
    "ring, int4": lambda: quantize_gradients(4),
    "ring, top-k 99 %": lambda: sparsify_gradients(0.99),
}


def measure(ctx: DistributedContext, master: str) -> dict[str, tuple[float, int]]:
    """Seconds, and bytes sent per call by this rank, of every method."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(ctx.rank)
    data = torch.randn(NBYTES // 4, generator=generator)
    result = torch.empty_like(data)
    sent: dict[str, int] = {}

    def reducing(name: str, compression: Compression | None) -> None:
        before = ctx.transport.traffic.sent
        ctx.all_reduce(data, algorithm="ring", compression=compression, name=name, out=result)
        sent[name] = ctx.transport.traffic.sent - before

    compressors = {name: make() for name, make in COMPRESSIONS.items()}
    actions = {
        name: lambda name=name, compressor=compressor: reducing(name, compressor)
        for name, compressor in compressors.items()
    }
    store = TCPStore(master, 29544, is_master=ctx.is_master, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    plain = torch.zeros(NBYTES // 4)
    seconds = interleaved(ctx, {**actions, "Gloo": lambda: dist.all_reduce(plain)}, rounds=3, calls=1)
    ctx.barrier()
    dist.destroy_process_group()
    ctx.barrier()
    return {name: (seconds[name], sent.get(name, 0)) for name in seconds}


def run() -> Report:
    """Ring against the line rate, compression against its bytes."""
    report = Report(
        "network",
        "All-reduce of 25 MB between hosts, 1 Gbit/s links",
        ("hosts", "method", "ms", "sent per rank", "bytes over ring", "time over ring", "of line rate"),
    )
    for hosts in (2, 4):
        outcome = run_on_hosts(measure, "10.77.0.1", hosts=hosts, rate="1gbit")
        methods = outcome.by_host[0][0]
        ring_seconds, ring_bytes = methods["ring"]
        for name, (seconds, sent) in methods.items():
            moved = sent if sent else ring_bytes
            rate = moved / RATE / seconds
            shares = (
                (f"{moved / ring_bytes:.3f}", f"{seconds / ring_seconds:.3f}")
                if sent
                else ("", f"{seconds / ring_seconds:.3f}")
            )
            report.rows.append((str(hosts), name, f"{seconds * 1e3:.1f}", str(moved), *shares, f"{rate:.0%}"))
            if name == "ring":
                report.targets.append(Target(f"ring, {hosts} hosts, of line rate", rate * 100, 85, unit=" %"))
    return report


if __name__ == "__main__":
    main(run)
