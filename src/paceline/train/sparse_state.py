"""A sparse tensor of a state as dense ones, for files, for peers and for hashes; and back with the same bits.

    <path>.indices    one column per stored value
    <path>.values     in the same order
    <path>.about      whether it is coalesced, how many dimensions are sparse, and its size

An optimizer with momentum keeps such a tensor for an embedding with sparse gradients. One that is not
coalesced stays so: where an index comes twice, the order of the values is the order in which they will be
added. Must not know what the state is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.core.errors import UsageError


def parts(tensor: Tensor, path: str) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors, by name; not copied."""
    about = [int(tensor.is_coalesced()), tensor.sparse_dim(), *tensor.shape]
    yield f"{path}.indices", tensor._indices()
    yield f"{path}.values", tensor._values()
    yield f"{path}.about", torch.tensor(about, dtype=torch.int64, device="cpu")


def whole(path: str, tensor_at: Callable[[str], Tensor]) -> Tensor:
    """The tensor whose parts `tensor_at` finds."""
    values = tensor_at(f"{path}.values")
    coalesced, _, *size = tensor_at(f"{path}.about").tolist()
    indices = tensor_at(f"{path}.indices").to(values.device)
    try:
        # Checked: an index beyond the size, from a damaged file, would have memory of others written to.
        return torch.sparse_coo_tensor(
            indices, values, tuple(size), is_coalesced=bool(coalesced), check_invariants=True
        )
    except RuntimeError as error:
        raise UsageError(
            f"the parts of {path} do not make a sparse tensor: {error}",
            remedy="resume from another version of the checkpoint",
        ) from error
