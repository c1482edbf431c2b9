"""Numbers, rates and times as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format as `loss 0.4312, accuracy 0.8710`, the loss first."""
    names = sorted(metrics, key=lambda name: (name != "loss", name))
    return ", ".join(f"{name} {number(metrics[name])}" for name in names)


def number(value: float) -> str:
    """Format with four digits that keep their width while the value changes, or scientifically."""
    if value == 0.0 or not math.isfinite(value) or 0.001 <= abs(value) < 1000.0:
        return f"{value:.4f}"
    return f"{value:.3e}"


def rate(value: float) -> str:
    """Format samples per second: 834, 18.2k, 1.31M."""
    if not math.isfinite(value):
        return "?"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def clock_time(seconds: float) -> str:
    """Format as 0:00:12, with days where there are any."""
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text


def duration(seconds: float) -> str:
    """Format a span in a suitable unit: 12 ms, 4.1 s, 3:20 min, 1:02:03 h."""
    if not math.isfinite(seconds):
        return f"{seconds} s"  # a journal may hold any number
    if seconds < 1.0:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100.0:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02} h"
