"""`fit` in a notebook: a real kernel shows one bar that is updated in place, and a history in one line."""

from __future__ import annotations

from typing import Any

import pytest
from tests.frontends.test_spawn_notebook import run, text

pytestmark = pytest.mark.leaky("the client of the kernel keeps the sockets of its event loop")

PREPARE = """
import torch
from torch import nn
import paceline

class Talks(paceline.Observer):
    def on_epoch(self, record):
        print(f"epoch {record.epoch} is over")

x = torch.randn(24, 5)
trainer = paceline.Trainer(
    lambda: nn.Linear(5, 2),
    nn.MSELoss(),
    optimizer=lambda p: torch.optim.SGD(p, 0.1),
    callbacks=[Talks()],
    config=paceline.TrainConfig(global_batch=12, epochs=3, run_dir=False, threads=1),
)
"""
FIT = """
trainer.fit((x, x[:, :2]))
"""
STOP = """
from paceline.engines.local import shutdown
shutdown()
"""


def test_a_cell_shows_one_bar_in_place_and_prints_beside_it() -> None:
    outputs: list[Any] = run(PREPARE, FIT, STOP)[1]
    displays = [one for one in outputs if one.output_type == "display_data"]
    assert len(displays) == 1, outputs
    html, plain = displays[0].data["text/html"], displays[0].data["text/plain"]
    assert html.count("<progress") == 1
    assert 'value="6" max="6"' in html
    assert "training on 24 samples" in plain
    assert "epoch 2/2  6/6  loss" in plain
    assert [line.split(":")[0] for line in plain.splitlines()][1:4] == ["epoch 0/2", "epoch 1/2", "epoch 2/2"]
    assert plain.splitlines()[-2].startswith("done: 6 steps")
    printed = text([one for one in outputs if one.output_type == "stream"])
    assert printed == "epoch 0 is over\nepoch 1 is over\nepoch 2 is over\n"
    result = next(one for one in outputs if one.output_type == "execute_result")
    assert result.data["text/plain"].startswith("History(6 steps, 3 epochs, loss ")
