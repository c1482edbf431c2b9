"""The hash of a shard's gradient: every bit of it counts, and how it lies in memory does not."""

from __future__ import annotations

import torch
import xxhash

from paceline.train.step.step_hashes import shard_hash


def test_its_bytes_are_as_documented():
    gradient = torch.tensor([[1.0, -0.0]])
    expected = xxhash.xxh3_128(b"dense\0float32\x001,2\0" + gradient.numpy().tobytes() + b"none\0")
    assert shard_hash([gradient, None]) == expected.hexdigest()


def test_every_bit_counts_and_memory_does_not():
    torch.manual_seed(0)
    first = torch.randn(3, 4)
    gradients = [first, None, torch.randn(5, dtype=torch.float64), torch.zeros(0)]
    known = shard_hash(gradients)
    assert shard_hash([g if g is None else g.clone() for g in gradients]) == known
    turned = first.t().contiguous().t()
    assert not turned.is_contiguous()
    assert shard_hash([turned, *gradients[1:]]) == known
    changed = [
        [gradients[0], torch.zeros(0), *gradients[2:]],
        [first.reshape(4, 3), *gradients[1:]],
        [gradients[0], gradients[2], None, gradients[3]],
        [first.double(), *gradients[1:]],
        gradients[:3],
    ]
    negative = first.clone()
    negative[1, 1] = torch.nextafter(negative[1, 1], torch.tensor(9.0))
    changed.append([negative, *gradients[1:]])
    assert len({known, *map(shard_hash, changed)}) == len(changed) + 1
    assert shard_hash([torch.tensor([0.0])]) != shard_hash([torch.tensor([-0.0])])


def test_all_kinds_of_gradients():
    real = torch.randn(2, 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        assert len(shard_hash([real.to(dtype)])) == 32
    complex_one = torch.randn(3, dtype=torch.complex64)
    assert shard_hash([complex_one.conj()]) == shard_hash([complex_one.conj().resolve_conj()])
    rows = torch.sparse_coo_tensor(
        torch.tensor([[3, 1, 3]]), torch.ones(3, 2), (5, 2), check_invariants=False
    )
    assert shard_hash([rows]) == shard_hash([rows.coalesce()])
    assert shard_hash([rows]) != shard_hash([rows.to_dense()])


def test_the_tail_counts():
    assert shard_hash([None], torch.zeros(2)) != shard_hash([None])
    assert shard_hash([None], torch.zeros(2)) != shard_hash([None], torch.ones(2))
