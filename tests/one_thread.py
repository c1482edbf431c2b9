"""One intra-op thread in the test process, for folders whose conftest imports this fixture.

Ranks in threads would fight over the cores, and how threads share a sum changes its last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
