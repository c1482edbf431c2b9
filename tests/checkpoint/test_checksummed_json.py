"""Documents that know whether they are whole."""

from __future__ import annotations

import json

import pytest

from paceline.checkpoint.checksummed_json import BrokenDocument, decode_document, encode_document
from paceline.core.type_conversion import finite

BODY = {"version": 12, "metrics": {"loss": 0.1, "bad": "NaN"}, "note": "größer", "files": [1, 2.5e-300, None]}


def test_round_trip_is_json():
    raw = encode_document(BODY)
    assert decode_document(raw) == BODY
    assert json.loads(raw)["version"] == 12


def test_every_single_bit_is_guarded():
    raw = encode_document(BODY)
    for index in range(len(raw)):
        for bit in range(8):
            broken = bytearray(raw)
            broken[index] ^= 1 << bit
            with pytest.raises(BrokenDocument):
                decode_document(bytes(broken))


def test_every_truncation_and_any_addition_is_seen():
    raw = encode_document(BODY)
    for length in range(len(raw)):
        with pytest.raises(BrokenDocument):
            decode_document(raw[:length])
    for more in (b" ", b"\n", b"{}", b"\0"):
        with pytest.raises(BrokenDocument):
            decode_document(raw + more)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is empty"),
        (b"{}", "has no checksum"),
        (b"[1]", "has no checksum"),
        (b'{"version": 3, "xxh3_128": "00"}', "does not match"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": NaN, "xxh3_128": ""}', "does not match"),
    ],
)
def test_what_is_wrong_is_said(raw, problem):
    with pytest.raises(BrokenDocument, match=problem):
        decode_document(raw)


def test_numbers_that_json_lacks():
    assert [finite(value) for value in (1.5, float("nan"), float("inf"), float("-inf"))] == [
        1.5,
        "NaN",
        "Infinity",
        "-Infinity",
    ]
