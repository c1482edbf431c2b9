"""A benchmark of this folder as a command: like `bench.report.main`, and with `--quick` for a short look."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

from bench.report import Report
from paceline.core.errors import PacelineError


def main(run: Callable[..., Report], arguments: dict[str, Any] | None = None) -> None:
    """Prints the table, or JSON; `arguments` maps further options to their defaults."""
    parser = argparse.ArgumentParser(description=run.__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="write table, data and plot to bench/results/")
    for name, default in (arguments or {}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = vars(parser.parse_args())
    as_json, save = options.pop("json"), options.pop("save")
    # Unwinds: what was started would train on, and spoil the next measurement.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        report: Report = run(**options)
    except PacelineError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)
    if as_json:
        print(json.dumps(report.to_plain(), indent=2))
    else:
        report.show()
    if save:
        report.save()
