"""Make a `Source` of the user's data, whatever its form; `read` turns requests into batches.

tensors, NumPy arrays, pandas, tuples and dicts of them   ArraySource   memory shared, rows copied out
map-style datasets, Hugging Face datasets, DataLoaders    MapSource     one sample at a time, or many
iterable datasets, generator functions, iterables         Stream        in order, `size` is None
data with an order of its own (orders.py)                 OrderedSource one of the first two
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.data.arrays import ArraySource, array_source, tensor_dataset_source
from paceline.data.batch_reader import read
from paceline.data.columns import class_in
from paceline.data.map_source import Loading, MapSource
from paceline.data.orders import OrderedData, OrderedSource, WeightedOrder
from paceline.data.source_interface import Batch, Indices, Request, Skipped, SkippedSampleError, Source
from paceline.data.stream import Stream

__all__ = [
    "ArraySource",
    "Batch",
    "Indices",
    "Loading",
    "MapSource",
    "Request",
    "Skipped",
    "SkippedSampleError",
    "Source",
    "Stream",
    "as_source",
    "check_apart",
    "read",
    "refuse_order",
]

_log = logging.getLogger(__name__)

_HUGGING_FACE = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
_KINDS = (
    "a tensor, a NumPy array, a pandas object, a tuple or dict of them, a dataset with __len__ and "
    "__getitem__, a Hugging Face dataset, a DataLoader, an iterable dataset, or a function that returns "
    "an iterator"
)


def as_source(data: Any) -> Source:
    """Return `data` as a source, without reading a sample or copying memory.

    Of a DataLoader the dataset, collate_fn, num_workers, prefetch_factor, pin_memory, timeout, worker_init_fn
    and multiprocessing_context are taken over. Its batch size and order are not: those belong to the run. A
    WeightedRandomSampler becomes a `WeightedOrder`.
    """
    if isinstance(data, ArraySource | MapSource | Stream | OrderedSource):
        return data
    if isinstance(data, OrderedData):
        return OrderedSource(as_source(data.data), data.order)
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if type(data) is TensorDataset:
        return tensor_dataset_source(data)
    found = array_source(data) or _hugging_face_source(data)
    if found is not None:
        return found
    if isinstance(data, Source) and not hasattr(data, "__getitem__"):
        return data
    if _is_iterable(data):
        return Stream(data)
    return MapSource(data, _size_of(data))


def check_apart(train: Source, validation: Mapping[str, Source]) -> None:
    """Refuse, of validation sets by name, an order, no sample, and a stream that is the training data too: an
    evaluation within an epoch would move it."""
    for name, one in validation.items():
        what = f"the validation set {name!r}" if name else "the validation data"
        refuse_order(one)
        if one.size == 0:
            raise UsageError(f"{what} is empty", remedy="pass data with at least one sample, or leave it out")
        if isinstance(train, Stream) and isinstance(one, Stream) and one.reads_from(train):
            raise UsageError(
                f"the training data and {what} are the same {one.name}, which remembers where reading "
                "stands: an evaluation would move the training data",
                remedy="give validation an object of its own (copy.deepcopy, or make it again)",
            )


def refuse_order(source: Source) -> None:
    """Refuse an order where each sample counts once, in the order of the data."""
    if isinstance(source, OrderedSource):
        raise UsageError(
            f"data to evaluate or predict has the order {type(source.order).__name__}: there every sample "
            "counts once, in the order of the data",
            remedy="give the data itself, without an order or a WeightedRandomSampler",
        )


def _is_iterable(data: Any) -> bool:
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, dict | str | bytes | type):
        return False
    return not hasattr(data, "__getitem__") and (isinstance(data, Iterable) or callable(data))


def _size_of(dataset: Any) -> int:
    name = type(dataset).__qualname__
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, dict | str | bytes | type):
        what = f"{with_article(dataset)} is no data to train on: {dataset!r:.60}"
        raise UsageError(what, remedy=f"pass {_KINDS}")
    try:
        return len(dataset)
    except TypeError as error:
        raise UsageError(
            f"{name} has __getitem__ and no length, so which samples exist is not known: {error}",
            remedy="define __len__, or make it an IterableDataset",
        ) from error


def _from_loader(loader: DataLoader[Any]) -> Source:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or _is_iterable(dataset):
        return _stream_of_loader(loader, dataset)
    bulk = _takes_lists(loader)
    source = _source_of_loader(loader, dataset, bulk)
    drawn = _inner_sampler(loader)
    if isinstance(drawn, WeightedRandomSampler):
        _log.info(
            "the DataLoader's WeightedRandomSampler becomes a paceline.WeightedOrder: %d draws in an epoch, "
            "by the run's seed",
            drawn.num_samples,
        )
        return OrderedSource(source, WeightedOrder(drawn.weights, drawn.num_samples))
    return source


def _inner_sampler(loader: DataLoader[Any]) -> Any:
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _source_of_loader(loader: DataLoader[Any], dataset: Any, bulk: bool) -> Source:
    collate: Any = loader.collate_fn
    _log.info(
        "of the DataLoader of %s, batch_size=%s, %s and drop_last=%s are not used: "
        "global_batch, shuffle and drop_last of the run's configuration decide",
        type(loader.dataset).__qualname__,
        loader.batch_size,
        type(loader.sampler).__qualname__,
        loader.drop_last,
    )
    if type(dataset) is TensorDataset and collate is default_collate and not bulk:
        # Rows in memory are chosen faster here than a worker process could hand them over.
        return replace(tensor_dataset_source(dataset), pin_memory=loader.pin_memory)
    loading = Loading(
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init=loader.worker_init_fn,
        context=loader.multiprocessing_context,
    )
    return MapSource(dataset, _size_of(dataset), collate, loading, bulk)


def _stream_of_loader(loader: DataLoader[Any], dataset: Any) -> Stream:
    if loader.batch_size is None:
        raise UsageError(
            f"the DataLoader of {type(dataset).__qualname__} has batch_size=None, so its items are batches "
            "already, and Paceline counts samples",
            remedy="let the dataset give single samples and set a batch_size (its value is not used)",
        )
    if loader.num_workers:
        _log.warning(
            "num_workers=%d of the DataLoader is not used: %s is iterable, read by one process, in order",
            loader.num_workers,
            type(dataset).__qualname__,
        )
    return Stream(dataset, collate=loader.collate_fn)


def _takes_lists(loader: DataLoader[Any]) -> bool:
    """Return whether the dataset takes lists of numbers; refuse samplers that choose samples themselves."""
    if loader.batch_size is None and type(loader.batch_sampler) is not BatchSampler:
        if loader.batch_sampler is not None:
            raise _own_sampler(loader, "batch_sampler", loader.batch_sampler)
        sampler: Any = loader.sampler
        if type(sampler) is BatchSampler:
            _check_sampler(loader, sampler.sampler)
            return True
        raise UsageError(
            f"the DataLoader of {type(loader.dataset).__qualname__} has batch_size=None: it gives single "
            "samples and never collates them",
            remedy="set a batch_size (its value is not used), or pass the dataset itself",
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise _own_sampler(loader, "batch_sampler", loader.batch_sampler)
    _check_sampler(loader, loader.batch_sampler.sampler)
    return False


def _check_sampler(loader: DataLoader[Any], sampler: Sampler[Any] | Iterable[Any]) -> None:
    """Accept samplers that give every sample once: the run's own order replaces theirs."""
    if type(sampler) is SequentialSampler or isinstance(sampler, DistributedSampler):
        return
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    ):
        return
    if type(sampler).__module__.startswith("paceline."):
        return
    if type(sampler) is WeightedRandomSampler:
        if sampler.replacement:
            return
        raise UsageError(
            f"the DataLoader of {type(loader.dataset).__qualname__} has a WeightedRandomSampler with "
            "replacement=False, whose later draws depend on all earlier ones",
            remedy="use replacement=True, or paceline.WeightedOrder(weights, samples=...).over(dataset)",
        )
    raise _own_sampler(loader, "sampler", sampler)


def _own_sampler(loader: DataLoader[Any], what: str, sampler: Any) -> UsageError:
    return UsageError(
        f"the DataLoader of {type(loader.dataset).__qualname__} has its own {what} "
        f"({type(sampler).__qualname__}), which chooses samples in a way that Paceline would not follow: "
        "a run applies every sample of the dataset exactly once per epoch, in an order of its own",
        remedy="for a part of the samples pass torch.utils.data.Subset(dataset, indices); for draws by "
        "weight paceline.WeightedOrder(weights).over(dataset); for samples of like length "
        "paceline.LengthBuckets(lengths).over(dataset); else pass the dataset itself",
    )


def _hugging_face_source(data: Any) -> MapSource | Stream | None:
    """Return a source of a Hugging Face dataset; None for anything else."""
    kind = class_in("datasets", _HUGGING_FACE, data)
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise UsageError(
            f"a {kind} holds several datasets: {', '.join(map(str, data))}",
            remedy=f"choose one, such as data[{next(iter(data), 'train')!r}]",
        )
    if kind == "Dataset":
        return _from_hugging_face_table(data)
    if kind == "IterableDataset":
        return Stream(
            data if data._formatting is not None else data.with_format("torch"),
            resumable=not _shuffles_in_memory(data),
        )
    return None


def _from_hugging_face_table(dataset: Any) -> MapSource:
    kind = dataset.format["type"]
    if kind == "custom":
        # A transform of the user's gives samples of any kind, so they are collated like any dataset's.
        return MapSource(dataset, len(dataset))
    if kind != "torch":
        columns = dataset.format["columns"]
        dataset = dataset.with_format("torch", columns=None if columns == dataset.column_names else columns)
    return MapSource(dataset, len(dataset), _checked_columns, bulk=True)


def _checked_columns(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as the dataset gives it: tensors, or texts. Lists of tensors are rows that differ."""
    for name, column in batch.items():
        if isinstance(column, Tensor):
            continue
        if any(value is None for value in column):
            raise UsageError(
                f"column {name!r} has missing values in this batch",
                remedy=f"fill or filter them, or leave the column out: dataset.remove_columns({name!r})",
            )
        if any(isinstance(value, Tensor) for value in column):
            shapes = sorted({tuple(value.shape) for value in column if isinstance(value, Tensor)})
            raise UsageError(
                f"the rows of column {name!r} differ in shape and do not make one tensor: {shapes[:4]}",
                remedy="pass a DataLoader with a collate_fn that pads, or map() them to one length",
            )
    return batch


def _shuffles_in_memory(dataset: Any) -> bool:
    """Return whether a shuffle buffer sits in the dataset: its own state_dict loses what is in the buffer, so
    resuming by it would skip samples. What cannot be looked into is not trusted."""
    node = getattr(dataset, "_ex_iterable", None)
    if node is None:
        return True
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if "Shuffled" in type(node).__name__:
            return True
        below = getattr(node, "ex_iterable", None)
        waiting.extend([below] if below is not None else getattr(node, "ex_iterables", ()))
    return False
