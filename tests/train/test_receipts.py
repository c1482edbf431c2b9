"""Receipts: steps in a row are one line, and nothing is said twice."""

from __future__ import annotations

from typing import Any, cast

import torch

from paceline.core.control.messages import Receipt
from paceline.train.receipts import Receipts
from paceline.train.recorder import CommittedStep


class Link:
    def __init__(self) -> None:
        self.sent: list[Receipt] = []

    def send(self, message: Receipt) -> None:
        self.sent.append(message)


def step(number: int, digest: str | None = None) -> CommittedStep:
    return CommittedStep(
        step=number,
        epoch=0,
        samples=1,
        learning_rate=0.1,
        skipped=False,
        hash=digest,
        offset=0,
        taken=1,
        generation=1,
        names=(),
        has_norm=False,
        numbers=torch.zeros(1),
    )


def test_steps_in_a_row_with_the_same_shards_are_one_receipt():
    link, receipts = Link(), Receipts()
    for number in (1, 2, 3):
        receipts.add(1, step(number), (0, 1), {})
    receipts.add(1, step(4), (0,), {})
    receipts.add(2, step(5), (0,), {})
    receipts.send(cast(Any, link))
    receipts.send(cast(Any, link))
    assert [(one.generation, one.first, one.last, one.shards) for one in link.sent] == [
        (1, 1, 3, (0, 1)),
        (1, 4, 4, (0,)),
        (2, 5, 5, (0,)),
    ]


def test_a_gap_is_a_receipt_of_its_own():
    link, receipts = Link(), Receipts()
    receipts.add(1, step(1), (0,), {})
    receipts.add(1, step(7), (0,), {})
    receipts.send(cast(Any, link))
    assert [(one.first, one.last) for one in link.sent] == [(1, 1), (7, 7)]


def test_hashes_of_audited_steps_go_along():
    link, receipts = Link(), Receipts()
    receipts.add(1, step(1), (0, 2), {})
    receipts.add(1, step(2, "abc"), (0, 2), {0: "x", 2: "y"})
    receipts.send(cast(Any, link))
    (one,) = link.sent
    assert one.hashes == {"2": "abc"}
    assert one.shard_hashes == ((2, 0, "x"), (2, 2, "y"))


def test_without_a_link_nothing_is_lost():
    link, receipts = Link(), Receipts()
    receipts.add(1, step(1), (0,), {})
    receipts.send(None)
    receipts.send(cast(Any, link))
    assert len(link.sent) == 1
