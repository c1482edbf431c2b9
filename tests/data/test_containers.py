"""Batches as trees: rebuilt, moved, and carried through a wire that knows plain containers only."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.core.errors import UsageError
from paceline.data.containers import map_leaves, packed, unpacked
from paceline.train.step.batch_feed import to_device


class Pair(NamedTuple):
    x: Any
    y: Any


def test_containers_keep_their_kind():
    inner: Any = defaultdict(list, {"c": (torch.ones(1), "text")})
    data = OrderedDict(a=Pair(1, [torch.ones(2)]), b=inner)
    found = map_leaves(data, lambda tensor: tensor + 1, lambda other: other)
    assert type(found) is OrderedDict
    assert type(found["a"]) is Pair
    assert found["a"].y[0].tolist() == [2.0, 2.0]
    assert found["b"]["c"][1] == "text"


def test_what_moves_by_itself_does():
    """A PackedSequence is a named tuple too, and parts of it may not leave the CPU."""
    moved = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), torch.device("meta"))
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


@pytest.mark.parametrize(
    "data",
    [
        {"a": [1, (2.5, None)], 3: "text"},
        Pair(1, [Pair(b"raw", ())]),
        ("paceline.tuple", 1),
        ("paceline.named_tuple", "os", "system", ["true"]),
        (Pair(1, 2), "x"),
    ],
)
def test_what_is_packed_comes_back(data):
    back = unpacked(packed(data))
    assert back == data
    assert type(back) is type(data)


def test_what_cannot_travel_is_refused_with_its_place():
    class Local(NamedTuple):
        x: int

    for odd, name in ((object(), "object"), (Local(1), "Local"), (OrderedDict(), "OrderedDict")):
        with pytest.raises(UsageError, match=rf"batch\['a'\]\[1\] of a stream is of type .*{name}"):
            packed({"a": [1, odd]})


def test_a_name_from_a_message_makes_named_tuples_only():
    with pytest.raises(UsageError, match=r"no named tuple os\.system"):
        unpacked(("paceline.named_tuple", "os", "system", ["true"]))
