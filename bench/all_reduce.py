"""All-reduce on one host against torch.distributed's Gloo and against the machine's own memory copy.

Ranks: 2 and 4 on a machine of up to 4 cores, 2, 4 and 8 on a larger one. One intra-op thread per rank.
Methods take turns in blocks, medians of the slowest rank.
"""

from __future__ import annotations

import os

from bench.report import Report, Series, Target, main
from paceline.cli.bench import size_text
from paceline.comm import benchmark
from paceline.comm.benchmark import Row
from paceline.frontends.spawn import spawn

KB4, MB1, MB25, MB100 = benchmark.SIZES
SMALL_MACHINE = {(KB4, ""): 5.0, (MB1, ""): 5.0, (MB25, ""): 2.5, (MB100, ""): 2.0}
LARGE_MACHINE = {
    (KB4, ""): 10.0,
    (MB25, ""): 1.5,
    (MB100, ""): 1.5,
    (MB25, "ctx.empty"): 3.0,
    (MB100, "ctx.empty"): 3.0,
}


def run() -> Report:
    """All-reduce on one host against Gloo."""
    cores = len(os.sched_getaffinity(0))
    counts, wanted = ((2, 4, 8), LARGE_MACHINE) if cores >= 8 else ((2, 4), SMALL_MACHINE)
    rows: list[Row] = []
    for count in counts:
        rows += spawn(benchmark.compare, workers=count, threads=1)[0]
    report = Report(
        "all_reduce",
        f"All-reduce on one host, {cores} cores, fp32",
        ("ranks", "size", "method", "ms", "Gloo ms", "faster", "of copy speed"),
        x_label="bytes",
        y_label="seconds",
        data={"measurements": [row.to_plain() for row in rows]},
        notes=["of copy speed: time of copying 2(N-1)/N of the message, over the time it took"],
    )
    for row in rows:
        report.rows.append(
            (
                str(row.ranks),
                size_text(row.nbytes),
                row.method,
                f"{row.seconds * 1e3:.3f}",
                f"{row.gloo_seconds * 1e3:.3f}",
                f"{row.speedup:.2f}x",
                f"{row.copy_fraction:.0%}",
            )
        )
        algorithm, _, place = row.method.partition(", ")
        bound = wanted.get((row.nbytes, place))
        if algorithm == "direct" and bound is not None:
            what = f"{row.ranks} ranks, {size_text(row.nbytes)}, {row.method}, against Gloo"
            report.targets.append(Target(what, row.speedup, bound))
    report.series = _series(rows, counts)
    return report


def _series(rows: list[Row], counts: tuple[int, ...]) -> list[Series]:
    lines = []
    for count in counts:
        mine = [row for row in rows if row.ranks == count]
        for method in ("direct", "direct, ctx.empty"):
            points = [row for row in mine if row.method == method]
            lines.append(
                Series(f"{method}, {count} ranks", [p.nbytes for p in points], [p.seconds for p in points])
            )
        points = [row for row in mine if row.method == "direct"]
        lines.append(
            Series(f"Gloo, {count} ranks", [p.nbytes for p in points], [p.gloo_seconds for p in points])
        )
    return lines


if __name__ == "__main__":
    main(run)
