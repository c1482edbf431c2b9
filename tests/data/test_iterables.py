"""Streams: order, randomness of their own, and coming back to where reading stood."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.core.errors import UsageError
from paceline.data.sources import Request, Stream, as_source, read


class Noisy(IterableDataset[Any]):
    """Draws from every generator, while it is opened and for every sample."""

    def __init__(self, count: int = 50) -> None:
        self.count = count
        self.opened = 0

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        first = random.random()
        for number in range(self.count):
            yield number, first + random.random(), float(np.random.rand()), torch.randn(2).tolist()


class Counted(IterableDataset[Any]):
    """Knows where it stands, by the usual convention, and draws from the process's generator."""

    def __init__(self) -> None:
        self.next = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        start, self.next = self.next, 0
        for number in range(start, 40):
            self.next = number + 1
            self.read.append(number)
            yield number, random.random()
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "more": torch.tensor([self.next])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["more"]) == state["next"]
        self.next = state["next"]


def generate() -> Iterator[int]:
    yield from range(10)


def test_kinds_of_streams() -> None:
    for data in (Noisy(10), generate, set(range(10)), iter(range(10)), (i for i in range(10)), {1: 0}.keys):
        source = as_source(data)
        assert isinstance(source, Stream)
        assert source.size is None
    assert Stream(generate).take(4) == [0, 1, 2, 3]


def test_samples_come_in_order_until_the_end() -> None:
    stream = Stream(generate)
    assert [stream.take(4), stream.take(4), stream.take(4), stream.take(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [],
    ]
    stream.start(epoch=1)
    assert (stream.take(2), stream.epoch, stream.position) == ([0, 1], 1, 2)


def test_how_many_are_taken_at_a_time_does_not_matter() -> None:
    at_once = Stream(Noisy())
    at_once.start(3, seed=7)
    expected = at_once.take(50)
    pieces = Stream(Noisy())
    pieces.start(3, seed=7)
    random.seed(99)
    seen: list[Any] = []
    for count in (1, 7, 2, 30, 10):
        seen += pieces.take(count)
        # Whatever others draw in between.
        torch.manual_seed(count), np.random.seed(count), random.random()
    assert seen == expected
    for epoch, seed in ((3, 8), (4, 7)):
        other = Stream(Noisy())
        other.start(epoch, seed)
        assert other.take(50) != expected


def test_the_generators_of_the_caller_are_left_alone() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw() for _ in range(3)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    stream = Stream(Noisy())
    seen = [draw()]
    stream.take(3)
    seen.append(draw())
    stream.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    seen.append(draw())
    assert seen == expected


@pytest.mark.parametrize("position", [0, 1, 17, 50])
def test_a_place_is_found_again_by_reading(position: int, caplog: pytest.LogCaptureFixture) -> None:
    whole = Stream(Noisy())
    whole.start(2, seed=5)
    expected = whole.take(50)
    first = Stream(Noisy())
    first.start(2, seed=5)
    first.take(position)
    state = json.loads(json.dumps(first.state_dict()))
    second = Stream(Noisy())
    second.load_state_dict(state)
    assert second.take(50) == expected[position:]
    samples = "1 sample" if position == 1 else f"{position} samples"
    assert (f"reading {samples} again" in caplog.text) == bool(position)


@pytest.mark.parametrize("position", [0, 1, 17, 39])
def test_a_place_is_found_at_once_where_the_dataset_knows_it(
    position: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Stream(Counted())
    whole.start(1, seed=5)
    expected = whole.take(40)
    first = Stream(Counted())
    first.start(1, seed=5)
    first.take(position)
    state = json.loads(json.dumps(first.state_dict()))
    dataset = Counted()
    second = Stream(dataset)
    second.load_state_dict(state)
    assert (second.epoch, second.position) == (1, position)
    assert second.state_dict() == state
    assert second.take(40) == expected[position:]
    assert dataset.read == list(range(position, 40))
    assert not caplog.records
    for _ in range(2):
        # A pass that is left halfway does not make the next one begin there.
        second.start(2, seed=5)
        assert [number for number, _ in second.take(3)] == [0, 1, 2]


def test_an_iterator_that_knows_where_it_stands() -> None:
    class Walk:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Walk:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at

        def state_dict(self) -> int:
            return self.at

        def load_state_dict(self, state: int) -> None:
            self.at = state

    first = Stream(lambda: Walk())
    assert first.take(5)[-1] == 5
    second = Stream(lambda: Walk())
    second.start()
    second.load_state_dict(first.state_dict())
    assert second.take(1) == [6]


def test_a_state_that_cannot_be_saved_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    stream = Stream(Odd())
    stream.take(3)
    assert stream.state_dict()["resume"] is None
    assert "cannot be saved" in caplog.text


def test_collating() -> None:
    stream = as_source(DataLoader(Noisy(), batch_size=2, collate_fn=lambda samples: [s[0] for s in samples]))
    assert isinstance(stream, Stream)
    assert stream.batch(stream.take(3)).data == [0, 1, 2]
    empty = stream.batch([])
    assert (empty.data, empty.count) == (None, 0)
    with pytest.raises(UsageError, match="2 samples of generate cannot be put into one batch"):
        Stream(generate).batch([torch.zeros(1), torch.zeros(2)])


def test_a_stream_as_a_source() -> None:
    source = as_source(generate)
    requests = [
        Request((0,), np.arange(0, 3)),
        Request((0,), np.arange(5, 8)),
        Request((0,), np.arange(8, 12)),
    ]
    batches = list(read(source, requests))
    assert [batch.data.tolist() for batch in batches] == [[0, 1, 2], [5, 6, 7], [8, 9]]
    assert [batch.count for batch in batches] == [3, 3, 2]
    with pytest.raises(UsageError, match="cannot go back to 1"):
        source.fetch(np.array([1]))
    with pytest.raises(UsageError, match="one after the other"):
        source.fetch(np.array([11, 10]))


def test_the_workers_of_a_loader_are_said_not_to_be_used(caplog: pytest.LogCaptureFixture) -> None:
    as_source(DataLoader(Noisy(), num_workers=2))
    assert "num_workers=2 of the DataLoader is not used" in caplog.text
    with pytest.raises(UsageError, match="batch_size=None"):
        as_source(DataLoader(Noisy(), batch_size=None))


def test_an_iterator_has_one_pass() -> None:
    stream = Stream(iter(range(5)))
    stream.start(0)
    assert stream.take(9) == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="can be read once, and epoch 1"):
        stream.start(1)


def test_a_function_that_returns_the_same_iterator_is_noticed() -> None:
    once = iter(range(5))
    stream = Stream(lambda: once)
    stream.take(5)
    stream.start(1)
    with pytest.raises(UsageError, match="gave samples before and gives none in epoch 1"):
        stream.take(1)


def test_an_error_names_the_sample_and_the_stream_does_not_go_on() -> None:
    def failing() -> Iterator[int]:
        yield from range(3)
        raise OSError("connection reset")

    stream = Stream(failing)
    assert stream.take(2) == [0, 1]
    for _ in range(2):
        with pytest.raises(UsageError, match=r"sample 3 of epoch 0 of .*failing .*OSError: connection reset"):
            stream.take(2)
    stream.start(0)
    assert stream.take(3) == [0, 1, 2]


def test_what_cannot_be_opened() -> None:
    def wants(argument: int) -> Iterator[int]:
        yield argument

    for wrong in (wants, lambda: 5):
        with pytest.raises(UsageError, match="cannot be opened: TypeError"):
            Stream(wrong).take(1)


def test_data_that_is_shorter_than_it_was() -> None:
    long = Stream(lambda: iter(range(10)))
    long.take(8)
    with pytest.raises(UsageError, match="ended after 5 samples, before sample 8"):
        Stream(lambda: iter(range(5))).load_state_dict(long.state_dict())


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"epoch": 0},
        {"epoch": 0, "seed": 0, "position": -1},
        {"epoch": 0, "seed": 0, "position": 1, "resume": "!"},
        {"epoch": 0, "seed": 0, "position": 1, "resume": "AAAA"},
    ],
)
def test_what_is_not_a_state(state: Any) -> None:
    with pytest.raises(UsageError):
        Stream(generate).load_state_dict(state)


def test_set_epoch_of_the_dataset_is_called() -> None:
    class Told(Noisy):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    dataset = Told()
    stream = Stream(dataset)
    stream.start(4)
    assert dataset.epoch == 4


def test_logging_is_quiet_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "paceline"):
        Stream(generate).take(3)
    assert not caplog.records
