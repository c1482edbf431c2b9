"""`paceline.metrics`: report numbers from anywhere in a rank, and receive them.

paceline.metrics.report("tokens", 4096, {"split": "train"})
paceline.metrics.add_sink(lambda name, value, tags: print(name, value, tags))
"""

from paceline.core.metric_reports import (
    add_sink as add_sink,
    remove_sink as remove_sink,
    report as report,
)
