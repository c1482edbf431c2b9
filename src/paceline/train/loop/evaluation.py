"""Evaluation and prediction, spread over the ranks, with the bits and the order of one process.

The data is cut into batches of one size; whole batches are assigned to the ranks, and what they give is put
together in the order of the data. Means are weighted by the samples of each batch; metrics over the whole set
are in whole_set_metrics.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.core.wording import counted, with_article
from paceline.data.batch_plan import assign
from paceline.data.containers import packed, plain, unpacked
from paceline.data.seeding import seed_everything
from paceline.data.sources import Batch, Request, Source, Stream, read, refuse_order
from paceline.train.loop.whole_set_metrics import BatchOutputs, WholeSetMetrics
from paceline.train.objective import Objective
from paceline.train.precision import autocast
from paceline.train.step.batch_feed import to_device
from paceline.train.step_info import StepInfo
from paceline.train.team import Team

_log = logging.getLogger(__name__)

_EVALUATING = 2  # marks keys of evaluation, apart from those of training


@dataclass(frozen=True)
class Forward:
    """Parts of the run that a pass over data needs."""

    team: Team
    module: nn.Module
    call: Callable[..., Any]  # the module, compiled where that was asked for
    device: torch.device
    precision: str
    seed: int
    batch: int
    most: int | None = None  # samples, where not all of them are to be seen

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        modes = [(child, child.training) for child in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad(), autocast(self.precision, self.device):
                yield
        finally:
            for child, training in modes:
                child.training = training


def evaluate_sets(
    forward: Forward,
    objective: Objective,
    sets: Mapping[str, Source],
    info: StepInfo,
    whole: WholeSetMetrics | None,
) -> tuple[dict[str, float], int]:
    """Return the metrics of several sets, "name/metric", and the number of all samples. Those of the set
    without a name, else of the first, are there as "metric" too."""
    found: dict[str, float] = {}
    total = 0
    for name, source in sets.items():
        try:
            metrics, samples = evaluate(forward, objective, source, info, whole)
        except Exception as error:
            if name:
                error.add_note(f"in the validation set {name!r}")
            raise
        total += samples
        found = found or metrics
        found |= {f"{name}/{metric}": value for metric, value in metrics.items()} if name else {}
    return found, total


def evaluate(
    forward: Forward,
    objective: Objective,
    source: Source,
    info: StepInfo,
    whole: WholeSetMetrics | None = None,
) -> tuple[dict[str, float], int]:
    """Return the means of loss and metrics over all samples, the metrics over the whole set, and the number
    of samples; on every rank. `info`: of the weights, for an objective that asks."""
    rows: list[list[Any]] = []
    kept: BatchOutputs = []
    with forward.evaluating():
        for number, batch in _my_batches(forward, source):
            for skipped in batch.skipped:
                _log.warning("evaluation continues without sample %d: %s", skipped.index, skipped.reason)
            if not batch.count:
                continue
            data = to_device(batch.data, forward.device)
            scored = objective.evaluate(forward.call, data, info)
            if whole is not None:
                kept.append([number, *whole.outputs(forward.call, data, scored, batch.count)])
            values = {"loss": scored.loss, **scored.metrics}
            rows.append([number, batch.count, {name: float(value) for name, value in values.items()}])
    scores = sorted(row for rank_rows in forward.team.context.all_gather(rows) for row in rank_rows)
    total = sum(count for _, count, _ in scores)
    if total == 0:
        raise UsageError("there is no sample to evaluate", remedy="pass data with at least one sample")
    names = scores[0][2]
    for number, _, values in scores:
        if values.keys() != names.keys():
            raise UsageError(
                f"the objective gave {sorted(names)} for batch {scores[0][0]} and {sorted(values)} for batch "
                f"{number}, and a mean is over all samples",
                remedy="return the same metrics for every batch",
            )
    # The exact sum, rounded once: no order of adding can change it.
    means = {
        name: math.fsum(_total(values[name], count) for _, count, values in scores) / total for name in names
    }
    measured = {} if whole is None else whole.measured(forward.team, kept, _joined)
    twice = sorted(means.keys() & measured.keys())
    if twice:
        raise UsageError(
            f"the objective and EvaluationConfig.metrics both give {', '.join(twice)}",
            remedy="rename one of them",
        )
    return {**means, **measured}, total


def _total(mean: float, count: int) -> float:
    """Return the sum behind a mean over `count` samples: exact where the mean is a share of them in single or
    double precision, as an accuracy is."""
    if not math.isfinite(mean):
        return mean
    share = round(mean * count)
    return float(share) if mean in (share / count, float(np.float32(share / count))) else mean * count


def predict(forward: Forward, source: Source) -> Any:
    """Return the model's outputs in the order of the data, put together, on the first rank; None elsewhere.

    Of a pair (input, target), or of an input alone, the model gets the input; a dict it gets as keyword
    arguments. Samples that cannot be read are an error, and so are outputs without a row for each sample: row
    n would not be of sample n. A single number in a dict (a `loss`) is left out, with a warning.
    """
    rows: list[list[Any]] = []
    left_out: list[int] = []
    of_batches: set[str] = set()
    with forward.evaluating():
        for number, batch in _my_batches(forward, source):
            left_out += [skipped.index for skipped in batch.skipped]
            if not batch.count:
                continue
            data = to_device(batch.data, forward.device)
            if isinstance(data, tuple | list) and len(data) in (1, 2):
                data = data[0]
            output = forward.call(**data) if isinstance(data, dict) else forward.call(data)
            output = per_sample(to_device(output, torch.device("cpu")), batch.count, "", of_batches)
            rows.append([number, output])
    missing = sorted(index for theirs in forward.team.context.all_gather(left_out) for index in theirs)
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        raise UsageError(
            f"{len(missing)} of the samples to predict for cannot be read and were left out: {shown}; row n "
            "of the result would no longer be of sample n",
            remedy='repair the data, or use on_corrupt="fail"; or predict for a Subset without these samples',
            samples=tuple(missing),
        )
    if of_batches and forward.team.context.is_master:
        _log.warning(
            "predict leaves out %s: one number for a whole batch, and not one for each sample",
            ", ".join(sorted(of_batches)),
        )
    gathered = forward.team.context.gather([[number, plain(output)] for number, output in rows])
    if gathered is None:
        return None
    # The first rank's own are as the model gave them, and show what the others' have to become.
    all_rows = [*rows, *(row for theirs in gathered[1:] for row in theirs)]
    outputs = [output for _, output in sorted(all_rows, key=lambda row: row[0])]
    if not outputs:
        raise UsageError("there is no sample to predict for", remedy="pass data with at least one sample")
    return _joined(outputs)


def _my_batches(forward: Forward, source: Source) -> Iterator[tuple[int, Batch]]:
    """Yield this rank's batches, with their numbers in the order of the data."""
    numbered = (
        _stream_batches(forward, source) if isinstance(source, Stream) else _indexed_batches(forward, source)
    )
    for number, batch in numbered:
        if batch.count or batch.skipped:
            seed_everything(forward.seed, number, _EVALUATING)
            yield number, batch


def _indexed_batches(forward: Forward, source: Source) -> Iterator[tuple[int, Batch]]:
    refuse_order(source)
    size = source.size or 0
    if forward.most is not None:
        size = min(size, forward.most)
    if not size:
        return
    mine = assign(-(-size // forward.batch), forward.team.world_size)[forward.team.rank]
    requests = (
        Request(
            (forward.seed, number, _EVALUATING),
            np.arange(number * forward.batch, min((number + 1) * forward.batch, size), dtype=np.int64),
        )
        for number in mine
    )
    yield from zip(mine, read(source, requests), strict=True)


def _stream_batches(forward: Forward, stream: Stream) -> Iterator[tuple[int, Batch]]:
    context, number = forward.team.context, 0
    if context.is_master:
        stream.start(0, forward.seed)
    while True:
        parts: list[Any] | None = None
        if context.is_master:
            taken = [stream.take(left) for left in _left(forward, number)]
            total = sum(map(len, taken))
            made = [stream.batch(samples) for samples in taken]
            parts = [[packed(batch.data), batch.count, total] for batch in made]
        data, count, total = context.scatter(parts)
        if not total:
            return
        yield number + context.rank, Batch(unpacked(data), count)
        number += context.world_size


def _left(forward: Forward, number: int) -> list[int]:
    """Return, for each rank, the samples of a stream's batch, from batch `number` on."""
    most = (number + forward.team.world_size) * forward.batch if forward.most is None else forward.most
    return [
        max(0, min(forward.batch, most - one * forward.batch))
        for one in range(number, number + forward.team.world_size)
    ]


def per_sample(output: Any, count: int, place: str, of_batches: set[str]) -> Any:
    """Return the output of a batch of `count` samples, where every tensor has a row for each."""
    if isinstance(output, Tensor):
        if output.ndim == 0 or output.shape[0] != count:
            what = "one number" if output.ndim == 0 else f"a tensor of shape {tuple(output.shape)}"
            raise UsageError(
                f"the model returned {what}{f' as {place}' if place else ''} for a batch of "
                f"{counted(count, 'sample')}: predictions have a row for each sample",
                remedy="return tensors whose first dimension is the batch; "
                "for the mean loss use evaluate, for other results a model that returns only what is asked",
            )
        return output
    if isinstance(output, dict):
        single = [key for key, value in output.items() if isinstance(value, Tensor) and value.ndim == 0]
        if single and len(single) < len(output):
            of_batches.update(map(str, single))
            output = {key: value for key, value in output.items() if key not in single}
        for key, value in output.items():
            per_sample(value, count, f"{place}[{key!r}]", of_batches)
    elif isinstance(output, tuple | list):
        for number, value in enumerate(output):
            per_sample(value, count, f"{place}[{number}]", of_batches)
    return output


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, dict):
        return {key: _joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple | list):
        joined = [_joined([output[i] for output in outputs]) for i in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    raise UsageError(
        f"the model returned {with_article(first)}, and predictions are put together from tensors",
        remedy="return tensors, or tuples, lists or dicts of them",
    )
