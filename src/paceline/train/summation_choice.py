"""Which way of summing a run's settings ask for. Must not know steps."""

from __future__ import annotations

import torch

from paceline.aggregate.strategy import Aggregation
from paceline.comm.compression import cast_gradients, quantize_gradients, sparsify_gradients
from paceline.comm.compression.base import Compression
from paceline.train.compressed_summation import CompressedSummation
from paceline.train.config import GradientCompression, TrainConfig
from paceline.train.gradients import Layout
from paceline.train.summation import CanonicalSummation, Checks, PlainSummation, Summation
from paceline.train.team import Team


def choose_summation(
    team: Team,
    layout: Layout,
    config: TrainConfig,
    device: torch.device,
    checks: Checks,
    aggregation: Aggregation | None,
) -> Summation:
    compression = _compression(config.compression)
    if config.mode == "fast":
        return PlainSummation(team, layout, device, compression, config.algorithm, aggregation)
    if compression is not None:
        return CompressedSummation(team, layout, device, compression)
    return CanonicalSummation(team, layout, device, checks)


def _compression(settings: GradientCompression | None) -> Compression | None:
    if settings is None:
        return None
    if settings.kind in ("fp16", "bf16"):
        made = cast_gradients(settings.kind)
    elif settings.kind == "top-k":
        made = sparsify_gradients(1.0 - settings.keep)
    else:
        made = quantize_gradients(int(settings.kind.removeprefix("int")))
    return Compression(made.codec, error_feedback=settings.error_feedback)
