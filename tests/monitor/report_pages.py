"""Histories and the report of them."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from paceline.train.history import EpochRecord, Evaluation, History, StepRecord

VOID = {"meta", "line", "path", "br"}


class Checker(HTMLParser):
    """Every tag that opens is closed in order; remembers tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(path):
    checker = Checker()
    text = path.read_text(encoding="utf-8")
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return text, checker


def run(workers=1, state="ab" * 32, steps=90, change=lambda step, loss: loss, stopped=None):
    records, evaluations, epochs = [], [], []
    for step in range(1, steps + 1):
        epoch = (step - 1) // 30
        loss = change(step, 2.0 * math.exp(-step / 20) + 0.1 * (step % 3))
        records.append(StepRecord(step=step, epoch=epoch, loss=loss, samples=16, seconds=0.01))
        if step % 30 == 0:
            metrics = {"loss": loss, "accuracy": 1.0 - loss / 3}
            evaluations.append(Evaluation(step=step, epoch=epoch, metrics=metrics))
            epochs.append(
                EpochRecord(epoch=epoch, steps=30, samples=480, loss=loss, seconds=0.3, validation=metrics)
            )
    return History(
        total_time=1.0,
        state_hash=state,
        steps=tuple(records),
        epochs=tuple(epochs),
        evaluations=tuple(evaluations),
        workers=workers,
        shards=4,
        stopped=stopped,
    )
