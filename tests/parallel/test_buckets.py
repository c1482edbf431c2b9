"""Which gradients share a bucket."""

from __future__ import annotations

from hypothesis import given, strategies as st

from paceline.parallel.buckets import plan


def test_the_last_parameters_come_first_and_buckets_stay_below_the_limit():
    assert plan([("f", 4), ("f", 4), ("f", 4), ("f", 4)], 8) == [[3, 2], [1, 0]]


def test_a_parameter_larger_than_the_limit_has_a_bucket_to_itself():
    assert plan([("f", 1), ("f", 100), ("f", 1)], 8) == [[2], [1], [0]]


def test_kinds_are_not_mixed_and_come_when_backward_completes_them():
    assert plan([("f", 1), ("d", 1), ("f", 1), ("d", 1)], 8) == [[3, 1], [2, 0]]
    assert plan([("d", 1), ("f", 1), ("f", 1), ("d", 1)], 8) == [[2, 1], [3, 0]]


@given(
    st.lists(st.tuples(st.sampled_from("fdh"), st.integers(0, 20)), max_size=30),
    st.integers(1, 40),
)
def test_every_parameter_is_in_exactly_one_bucket(kinds, limit):
    buckets = plan(kinds, limit)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(len(kinds)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({kinds[position][0] for position in bucket}) == 1
        assert len(bucket) == 1 or sum(kinds[position][1] for position in bucket) <= limit
