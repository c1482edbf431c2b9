"""Generators in a rank are what they are in any fresh process: seeded by the system, each its own way.

NumPy and torch seed their global generators from the system when they are imported, and that was in the fork
server. Without this every rank of every group would go on from the same numbers. (Python's own `random` does
the same by itself.) Nothing is seeded with a chosen number. Must not import any of those libraries.
"""

from __future__ import annotations

import sys


def renew() -> None:
    """Seed the inherited global generators from the system again."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
