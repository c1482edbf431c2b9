"""PowerSGD: exact where it can be, nothing lost for good, the same on all ranks; failures change nothing."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from paceline.comm.compression import PowerSGD
from paceline.core.errors import DisagreementError, UsageError


def alone(flat: Tensor) -> Tensor:
    """The average of one rank."""
    return flat.clone()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


class Ranks:
    """Ranks as threads that meet in `average`."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._given: dict[int, Tensor] = {}
        self.calls: list[int] = []

    def average(self, rank: int) -> Callable[[Tensor], Tensor]:
        def meet(flat: Tensor) -> Tensor:
            self._given[rank] = flat
            self._barrier.wait()
            mean = torch.stack([self._given[r] for r in sorted(self._given)]).mean(0)
            if self._barrier.wait() == 0:
                self.calls.append(flat.numel())
            return mean

        return meet

    def run(self, instances: list[PowerSGD], tensors: list[list[Tensor]]) -> list[list[Tensor]]:
        with ThreadPoolExecutor(len(instances)) as pool:
            calls = [
                pool.submit(instance.reduce, own, self.average(rank))
                for rank, (instance, own) in enumerate(zip(instances, tensors, strict=True))
            ]
            return [call.result() for call in calls]


def test_a_matrix_of_that_rank_comes_back_whole() -> None:
    matrix = low_rank(40, 30, 2)
    (result,) = PowerSGD(rank=2).reduce([matrix], alone)
    torch.testing.assert_close(result, matrix, rtol=1e-4, atol=1e-4)


@given(
    rows=st.sampled_from([1, 2, 8, 33]),
    columns=st.sampled_from([1, 3, 20, 64]),
    rank=st.integers(1, 4),
    exponent=st.sampled_from([-30, -10, 0, 10]),
)
@settings(max_examples=40, deadline=None)
def test_what_was_sent_plus_the_residual_is_what_was_given(
    rows: int, columns: int, rank: int, exponent: int
) -> None:
    compressor = PowerSGD(rank, min_compression=1.0)
    unit = 10.0**exponent
    total_given, total_sent = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for call in range(4):
        matrix = normal(rows, columns, seed=call) * unit
        total_given += matrix
        total_sent += compressor.reduce([matrix], alone)[0]
    owed = compressor.state_dict().get("residual.gradients.0", torch.zeros(rows, columns))
    torch.testing.assert_close((total_sent + owed) / unit, total_given / unit, rtol=0, atol=1e-4)


def test_what_the_ranks_sent_plus_their_residuals_is_what_they_gave() -> None:
    ranks, instances = Ranks(3), [PowerSGD(1) for _ in range(3)]
    given_, sent = torch.zeros(16, 24), torch.zeros(16, 24)
    for call in range(4):
        tensors = [[normal(16, 24, seed=10 * call + rank)] for rank in range(3)]
        results = ranks.run(instances, tensors)
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][0], results[2][0])
        given_ += torch.stack([own[0] for own in tensors]).mean(0)
        sent += results[0][0]
    owed = torch.stack([i.state_dict()["residual.gradients.0"] for i in instances]).mean(0)
    torch.testing.assert_close(sent + owed, given_, rtol=0, atol=1e-4)


def test_residuals_do_not_collect_the_differences_between_ranks() -> None:
    """Rank-one gradients that cancel in the average are in every rank's subspace: nothing is owed."""
    ranks, instances = Ranks(2), [PowerSGD(1) for _ in range(2)]
    common = low_rank(16, 24, 1)
    for _ in range(3):
        ranks.run(instances, [[3 * common], [-1 * common]])
    for instance in instances:
        assert instance.state_dict()["residual.gradients.0"].abs().max() < 1e-3


def test_what_travels() -> None:
    ranks = Ranks(2)
    tensors = [normal(64, 32), normal(64), normal(8, 4, 3, 3), normal(3, 3), torch.zeros(0, 5)]
    ranks.run([PowerSGD(2), PowerSGD(2)], [tensors, tensors])
    first = 2 + 64 + 9 + 2 * (64 + 8)
    second = 2 * (32 + 36)
    assert ranks.calls == [first, second]


def test_vectors_alone_take_one_call_and_nothing_takes_none() -> None:
    ranks = Ranks(2)
    tensors = [[normal(5, seed=rank)] for rank in range(2)]
    results = ranks.run([PowerSGD(), PowerSGD()], tensors)
    assert ranks.calls == [5]
    assert torch.equal(results[0][0], torch.stack([tensors[0][0], tensors[1][0]]).mean(0))
    assert PowerSGD().reduce([], alone) == []


def test_warm_start_closes_in_on_the_best_approximation() -> None:
    matrix = normal(48, 48) @ torch.diag(0.7 ** torch.arange(48)) @ normal(48, 48, seed=1)
    singular = torch.linalg.svdvals(matrix)
    best = singular[2:].square().sum().sqrt()
    warm = PowerSGD(2, error_feedback=False)
    errors = [float((warm.reduce([matrix], alone)[0] - matrix).norm() / best) for _ in range(20)]
    assert errors[-1] < 1.01
    assert errors[0] > errors[-1] + 0.01


def test_dtypes_and_shapes_come_back_as_they_went() -> None:
    tensors = [normal(32, 4, 8).bfloat16(), normal(3).half(), normal(16, 16)]
    before = [t.clone() for t in tensors]
    results = PowerSGD(1).reduce(tensors, alone)
    assert [(r.dtype, r.shape) for r in results] == [(t.dtype, t.shape) for t in tensors]
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    double = low_rank(32, 32, 2).double()
    (result,) = PowerSGD(2).reduce([double], alone)
    torch.testing.assert_close(result, double, rtol=1e-6, atol=1e-6)


def test_it_comes_to_life_again_after_zeros_and_after_nan() -> None:
    compressor = PowerSGD(2)
    matrix = low_rank(20, 20, 2)
    (zero,) = compressor.reduce([torch.zeros(20, 20)], alone)
    assert not zero.any()
    broken = matrix.clone()
    broken[3, 4] = float("nan")
    (visible,) = compressor.reduce([broken], alone)
    assert visible.isnan().any()
    for _ in range(2):
        (result,) = compressor.reduce([matrix], alone)
    torch.testing.assert_close(result, matrix, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_failed_average_changes_nothing(failing_call: int) -> None:
    compressor = PowerSGD(1)
    compressor.reduce([normal(20, 20)], alone)
    before = compressor.state_dict()
    calls = 0

    def broken(flat: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise ConnectionError("a peer is gone")
        return flat

    with pytest.raises(ConnectionError):
        compressor.reduce([normal(20, 20, seed=1)], broken)
    after = compressor.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_saved_state_continues_where_it_was(warm_start: bool) -> None:
    original, restored = (PowerSGD(1, warm_start=warm_start) for _ in range(2))
    for call in range(3):
        original.reduce([normal(20, 20, seed=call), normal(4)], alone, name="bucket.0")
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for call in range(3, 6):
        tensors = [normal(20, 20, seed=call), normal(4)]
        expected = original.reduce(tensors, alone, name="bucket.0")
        assert torch.equal(restored.reduce(tensors, alone, name="bucket.0")[0], expected[0])


def test_ranks_at_different_steps_are_told() -> None:
    ranks, instances = Ranks(2), [PowerSGD(1), PowerSGD(1)]
    tensors = [[normal(20, 20)], [normal(20, 20, seed=1)]]
    ranks.run(instances, tensors)
    instances[1].reduce(tensors[1], alone)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(instances[r].reduce, tensors[r], ranks.average(r)) for r in range(2)]
        errors = [call.exception(timeout=30) for call in calls]
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert "this rank is at step 1" in str(errors[0])
    assert "this rank is at step 2" in str(errors[1])


def test_wrong_states_and_inputs_are_refused() -> None:
    compressor = PowerSGD(1)
    compressor.reduce([normal(20, 20)], alone)
    with pytest.raises(UsageError, match=r"written by powersgd1.*this compressor is powersgd2"):
        PowerSGD(2).load_state_dict(compressor.state_dict())
    with pytest.raises(UsageError, match="unknown entry 'momentum'"):
        compressor.load_state_dict({**compressor.state_dict(), "momentum": torch.zeros(1)})
    with pytest.raises(UsageError, match="error_feedback=False"):
        PowerSGD(1, error_feedback=False).load_state_dict(compressor.state_dict())
    with pytest.raises(UsageError, match="one name per list of tensors"):
        compressor.reduce([normal(20, 30)], alone)
    with pytest.raises(UsageError, match=r"given a Tensor; it takes a list of tensors"):
        compressor.reduce(normal(20, 20), alone)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"torch\.int64"):
        compressor.reduce([torch.zeros(3, 3, dtype=torch.int64)], alone)
    with pytest.raises(UsageError, match="given 5 elements and returned 4"):
        compressor.reduce([normal(5)], lambda flat: flat[:4])
