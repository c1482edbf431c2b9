"""Huge pages for tensors that peers reach again and again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paceline.comm.algorithms.shm.huge_pages import HugePages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _huge_kilobytes(tensor: torch.Tensor) -> int:
    """Return how much of the mappings of a tensor's memory lies in huge pages."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    total, is_part = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            is_part = int(bounds[1], 16) < stop and start < int(bounds[2], 16)
        elif is_part and line.startswith("AnonHugePages:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(),
    reason="the kernel gives huge pages to none or to all: /sys/kernel/mm/transparent_hugepage/enabled",
)
def test_memory_that_stays_gets_huge_pages_and_keeps_its_values() -> None:
    tensor, once = torch.arange(4 << 20, dtype=torch.float32), torch.ones(4 << 20)
    pages = HugePages()
    pages.use(once)
    assert _huge_kilobytes(once) == 0
    for _ in range(4):
        pages.use(tensor)
    assert _huge_kilobytes(tensor) >= 8 << 10
    assert torch.equal(tensor, torch.arange(4 << 20, dtype=torch.float32))
