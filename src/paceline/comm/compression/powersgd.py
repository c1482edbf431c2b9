"""PowerSGD: send each gradient matrix as the product of two thin ones.

Idea:    one step of subspace iteration per call. For a matrix M (n x m) and a thin Q (m x r) that all ranks
         share: P = average of M Q, columns made orthonormal; Q = average of M^T P; the result is P Q^T. The
         Q of this call starts the next one (warm start), so that over the calls P and Q follow the largest
         singular directions.
Travels: r (n + m) numbers instead of n m, in two calls of `average`: all P with everything that is not
         compressed (vectors, and matrices that would not shrink by `min_compression`) in the first, all Q
         in the second. Two more numbers in the first tell whether all ranks are at the same step.
Costs:   four thin matrix products per matrix, and an orthonormalisation of r columns.
Lost:    per rank M - P P^T M, all that lies outside the shared subspace; it stays with that rank and is
         added to its next gradient. The loss is taken against what this rank sent, not against the averaged
         result, which would make the ranks' differences from the average pile up in their residuals.
Exact:   P P^T M + residual == M up to the rounding of one subtraction; what is not compressed is just
         averaged. Gradients in half precision are computed in float32, and the rounding of the result is
         not fed back.

Being linear it is no codec: it averages factors rather than bytes, through any algorithm that gives all
ranks the same bits. Ranks whose factors differed would drift apart without an error, so after a call that
failed on some ranks only, all ranks must load one state of the same step; the two extra numbers turn a
missed step into a DisagreementError.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.comm.compression.error_feedback import check_saved_name, text_to_tensor
from paceline.core.errors import DisagreementError, UsageError
from paceline.core.wording import counted

Average = Callable[[Tensor], Tensor]

_NAME_KEY = "compressor"
# A column that keeps less than this of its length when the earlier ones are taken out was rounding noise.
_DEPENDENT = 1e-6
# Marks are integers under 256: if any two differ, their variance over the ranks is far above this rounding
# error.
_MARK_TOLERANCE = 0.05


@dataclass(frozen=True)
class _Matrix:
    """A gradient that is worth compressing: where it stands in the list, and the shape it is treated as."""

    index: int
    rows: int
    columns: int
    rank: int


@final
class PowerSGD:
    """Low-rank gradient compression with error feedback and warm start; it belongs to one rank."""

    def __init__(
        self,
        rank: int = 2,
        *,
        min_compression: float = 2.0,
        warm_start: bool = True,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        if type(rank) is not int or rank < 1:
            raise UsageError(
                f"PowerSGD was given rank={rank!r}; allowed are integers from 1",
                remedy="use PowerSGD(rank=2), and a higher rank for more precision and more bytes",
            )
        number = isinstance(min_compression, int | float) and not isinstance(min_compression, bool)
        if not number or min_compression < 1:
            raise UsageError(
                f"PowerSGD was given min_compression={min_compression!r}; allowed are numbers from 1",
                remedy="leave it at 2.0: matrices that would not shrink to half are then sent as they are",
            )
        self.rank = rank
        self.min_compression = min_compression
        self.warm_start = warm_start
        self.error_feedback = error_feedback
        self.seed = seed
        self._residuals: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    @property
    def name(self) -> str:
        """The name of the settings: ranks whose names differ cannot work together."""
        return f"powersgd{self.rank}"

    def reduce(self, tensors: Sequence[Tensor], average: Average, *, name: str = "gradients") -> list[Tensor]:
        """Return the averages over all ranks of `tensors`, those of matrices up to the low rank.

        `average` takes a flat tensor and returns the average of all ranks' ones, the same bits on every
        rank. The list must have the same shapes on every rank and, under one `name`, in every call. The
        inputs are not changed. If `average` raises, the state is as before.
        """
        dtype = _working_dtype(tensors)
        matrices = [m for i, t in enumerate(tensors) if (m := self._as_matrix(i, t)) is not None]
        compressed = {matrix.index for matrix in matrices}
        plain = [i for i in range(len(tensors)) if i not in compressed]

        step = self._steps.get(name, 0)
        device = tensors[0].device if tensors else torch.device("cpu")
        inputs = [self._with_residual(matrix, tensors[matrix.index], dtype, name) for matrix in matrices]
        starts = [
            self._start(matrix, name, step, given) for matrix, given in zip(matrices, inputs, strict=True)
        ]
        mark = float(zlib.crc32(f"{self.name}/{self.seed}/{name}/{step}".encode()) & 0xFF)
        marks = torch.tensor([mark, mark * mark] if matrices else [], dtype=dtype, device=device)

        first = [marks, *(tensors[i].detach().to(dtype) for i in plain)]
        first += [given @ start for given, start in zip(inputs, starts, strict=True)]
        seen, *averaged = average_together(first, average)
        if matrices:
            self._check_marks(seen, name, step)

        lefts = [_orthonormal(left) for left in averaged[len(plain) :]]
        own = [given.T @ left for given, left in zip(inputs, lefts, strict=True)]
        rights = average_together(own, average)

        results: list[Tensor] = [torch.empty(0)] * len(tensors)
        for i, value in zip(plain, averaged[: len(plain)], strict=True):
            results[i] = value.to(tensors[i].dtype)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            like = tensors[matrix.index]
            results[matrix.index] = (left @ right.T).view(like.shape).to(like.dtype)

        self._steps[name] = step + 1
        for matrix, given, left, sent, right in zip(matrices, inputs, lefts, own, rights, strict=True):
            key = f"{name}.{matrix.index}"
            if self.error_feedback:
                lost = torch.addmm(given, left, sent.T, alpha=-1)
                self._residuals[key] = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            if self.warm_start:
                self._factors[key] = right
        return results

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of residuals (of this rank) and factors and steps (the same on all ranks)."""
        state = {_NAME_KEY: text_to_tensor(self.name)}
        state |= {f"step.{name}": torch.tensor(step) for name, step in self._steps.items()}
        state |= {f"residual.{key}": value.clone() for key, value in self._residuals.items()}
        state |= {f"factor.{key}": value.clone() for key, value in self._factors.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the whole state; tensors move to the gradients' device when these come."""
        check_saved_name(state, _NAME_KEY, self.name)
        loaded: dict[str, dict[str, Tensor]] = {"step.": {}, "residual.": {}, "factor.": {}}
        for key, value in state.items():
            kind, dot, rest = key.partition(".")
            if kind + dot in loaded:
                loaded[kind + dot][rest] = value.detach().clone()
            elif key != _NAME_KEY:
                raise UsageError(
                    f"the saved state of {self.name} has an unknown entry {key!r}",
                    remedy="load what PowerSGD.state_dict() returned",
                )
        if loaded["residual."] and not self.error_feedback:
            raise UsageError(
                f"the saved state holds residuals, and this {self.name} has error_feedback=False",
                remedy="load it into a compressor with error feedback, or start without a saved state",
            )
        self._steps = {name: int(step) for name, step in loaded["step."].items()}
        self._residuals, self._factors = loaded["residual."], loaded["factor."]

    def _as_matrix(self, index: int, tensor: Tensor) -> _Matrix | None:
        if tensor.dim() < 2 or tensor.numel() == 0:
            return None
        rows = tensor.shape[0]
        columns = tensor.numel() // rows
        rank = min(self.rank, rows, columns)
        if rank * (rows + columns) * self.min_compression > rows * columns:
            return None
        return _Matrix(index, rows, columns, rank)

    def _with_residual(self, matrix: _Matrix, tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        given = tensor.detach().to(dtype).reshape(matrix.rows, matrix.columns)
        residual = self._residuals.get(f"{name}.{matrix.index}")
        if residual is None:
            return given
        self._check_kept("residual", residual, given.shape, dtype, f"tensor {matrix.index} of {name!r}")
        return given + residual.to(given.device)

    def _start(self, matrix: _Matrix, name: str, step: int, like: Tensor) -> Tensor:
        """Return the thin matrix that this call starts from: the last one, with dead columns drawn anew."""
        key = f"{name}.{matrix.index}"
        start = self._factors.get(key) if self.warm_start else None
        if start is None:
            return _orthonormal(self._draw(matrix, key, step, like))
        start = start.to(like.device)
        shape = torch.Size((matrix.columns, matrix.rank))
        self._check_kept("factor", start, shape, like.dtype, f"tensor {matrix.index} of {name!r}")
        # A gradient that was zero, of lower rank or not finite leaves columns that would never come to life
        # again.
        dead = ~start.isfinite().all(dim=0) | (start == 0).all(dim=0)
        if bool(dead.any()):
            start = torch.where(dead, self._draw(matrix, key, step, like), start)
        return _orthonormal(start)

    def _check_kept(self, kind: str, kept: Tensor, shape: torch.Size, dtype: torch.dtype, whose: str) -> None:
        if kept.shape != shape or kept.dtype != dtype:
            raise UsageError(
                f"{self.name} holds a {kind} of {tuple(kept.shape)} x {kept.dtype} for {whose}, and was now "
                f"given {tuple(shape)} x {dtype}",
                remedy="one name per list of tensors: give another list another name",
            )

    def _draw(self, matrix: _Matrix, key: str, step: int, like: Tensor) -> Tensor:
        """Draw random columns, the same on all ranks and devices: on the CPU, from seed, tensor and step."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{key}/{step}".encode()))
        drawn = torch.randn(matrix.columns, matrix.rank, generator=generator, dtype=torch.float32)
        return drawn.to(device=like.device, dtype=like.dtype)

    def _check_marks(self, seen: Tensor, name: str, step: int) -> None:
        mean, mean_of_squares = seen.tolist()
        if abs(mean_of_squares - mean * mean) > _MARK_TOLERANCE:
            raise DisagreementError(
                f"the ranks differ in the state of {self.name} for {name!r}; this rank is at step {step}",
                remedy="after a failed call or when ranks join, load the state of one step on all ranks",
            )


def average_together(parts: Sequence[Tensor], average: Average) -> list[Tensor]:
    """Average many tensors in one call; no call at all if they hold nothing."""
    total = sum(part.numel() for part in parts)
    if total == 0:
        return [part.clone() for part in parts]
    averaged = average(torch.cat([part.reshape(-1) for part in parts]))
    if averaged.numel() != total:
        raise UsageError(
            f"PowerSGD's `average` was given {counted(total, 'element')} and returned {averaged.numel()}",
            remedy="return the element-wise average over all ranks, in the same shape",
        )
    pieces = torch.split(averaged.reshape(-1), [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _orthonormal(matrix: Tensor) -> Tensor:
    """Make the columns orthonormal, in order and without changing signs; dependent ones become zero.

    Gram-Schmidt, twice over, in double precision: with few columns it is as fast as a QR decomposition, has
    no signs to fix, and treats a matrix of lower rank in a stated way. Values that are not finite stay so.
    """
    columns: list[Tensor] = []
    for column in matrix.double().unbind(dim=1):
        rest = column
        for _ in range(2):
            for earlier in columns:
                rest = rest - earlier * (earlier @ rest)
        length = torch.linalg.vector_norm(rest)
        dependent = length <= _DEPENDENT * torch.linalg.vector_norm(column)
        columns.append(torch.where(dependent, 0.0, rest / length))
    return torch.stack(columns, dim=1).to(matrix.dtype)


def _working_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    if not isinstance(tensors, list | tuple) or not all(isinstance(item, Tensor) for item in tensors):
        raise UsageError(
            f"PowerSGD.reduce was given a {type(tensors).__name__}; it takes a list of tensors",
            remedy="pass [p.grad for p in model.parameters()]; a flat gradient has no matrices to compress",
        )
    if wrong := sorted({str(t.dtype) for t in tensors if not t.is_floating_point()}):
        raise UsageError(
            f"PowerSGD.reduce was given tensors of {', '.join(wrong)}; it takes floating-point tensors",
            remedy="reduce integers without compression",
        )
    if len(devices := sorted({str(t.device) for t in tensors})) > 1:
        raise UsageError(
            f"PowerSGD.reduce was given tensors on {', '.join(devices)}; all must be on one device",
            remedy="reduce the tensors of each device under a name of their own",
        )
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
