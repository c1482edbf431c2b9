"""Saving in the background: what the caller may do meanwhile, and what it is told."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given, strategies as st
from tests.checkpoint.saving import assert_is, finished, save, state_at, tensors_at

from paceline.checkpoint.digests import share_of
from paceline.checkpoint.manifest import CheckpointInfo, FileRecord
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, WriteResult
from paceline.core.errors import CommTimeoutError, InternalError, PlatformError, UsageError
from paceline.core.storage.open_storage import open_storage


class Gate:
    """A call function that stops at the first call of one name until it is opened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, operation, /, *args, **kwargs):
        if operation.__name__ == self.name:
            self.reached.set()
            assert self.opened.wait(20)
        return operation(*args, **kwargs)


def test_every_rank_writes_its_share(tmp_path):
    store = CheckpointStore(tmp_path)
    writers = [BackgroundWriter(CheckpointStore(tmp_path), rank, 3) for rank in range(3)]
    version = store.next_version()
    for writer in writers:
        writer.save(version, tensors_at(1), state_at(1) if writer.part == 0 else None)
    records = [record for writer in writers for record in finished(writer).records]
    assert len(records) == 4
    writers[0].commit(version, records, CheckpointInfo(step=1))
    committed = finished(writers[0])
    assert committed.error is None
    assert committed.manifest == store.manifests()[0]
    assert committed.nbytes == committed.manifest.nbytes
    assert_is(store.newest_good(), 1)
    for writer in writers:
        writer.close()


def test_the_caller_goes_on_and_may_change_everything(tmp_path):
    gate = Gate("write")
    with BackgroundWriter(CheckpointStore(open_storage(tmp_path, call=gate))) as writer:
        tensors, state = tensors_at(1), state_at(1)
        version = writer.store.next_version()
        writer.save(version, tensors, state)
        assert gate.reached.wait(20)
        # Nothing is on the disk yet, and the training goes on.
        for tensor in tensors.values():
            tensor.zero_()
        state.clear()
        assert writer.busy
        assert writer.poll() is None
        gate.opened.set()
        done = finished(writer)
        writer.commit(version, done.records, CheckpointInfo(step=1))
        writer.wait(20)
    assert_is(CheckpointStore(tmp_path).newest_good(), 1)


def test_at_most_one_is_under_way(tmp_path):
    gate = Gate("write")
    with BackgroundWriter(CheckpointStore(open_storage(tmp_path, call=gate))) as writer:
        writer.save(writer.store.next_version(), tensors_at(1), {})
        for again in (
            lambda: writer.save(2, tensors_at(2)),
            lambda: writer.commit(1, [], CheckpointInfo(step=1)),
            lambda: writer.discard(1),
            lambda: writer.prepare(tensors_at(1)),
        ):
            with pytest.raises(UsageError, match="still under way"):
                again()
        with pytest.raises(CommTimeoutError):
            writer.wait(0.01)
        gate.opened.set()
        assert writer.wait(20) is not None
        assert not writer.busy
        assert writer.poll() is None
        assert writer.wait() is None


def test_memory_is_one_copy_of_the_share_and_is_kept(tmp_path):
    tensors = {f"t{index}": torch.ones(1 << 18) for index in range(8)}
    with BackgroundWriter(CheckpointStore(tmp_path), 0, 2) as writer:
        assert writer.buffer_bytes == 0
        writer.prepare(tensors)
        held = writer.buffer_bytes
        assert (4 << 20) < held < (7 << 20)
        for _ in range(3):
            writer.save(writer.store.next_version(), tensors, {})
            assert finished(writer).error is None
        assert writer.buffer_bytes == held
    assert writer.buffer_bytes == 0


def test_tensors_of_one_rank_only(tmp_path):
    store = CheckpointStore(tmp_path)
    version = store.next_version()
    records: list[FileRecord] = []
    for rank in range(2):
        with BackgroundWriter(store, rank, 2) as writer:
            own = {f"residual/{rank}": torch.full((2,), rank)}
            writer.prepare(tensors_at(1), own=own)
            writer.save(version, tensors_at(1), {} if rank == 0 else None, own=own)
            records += finished(writer).records
            with pytest.raises(UsageError, match="'model/bias' is among the tensors of all ranks"):
                writer.save(version, tensors_at(1), own={"model/bias": torch.ones(1)})
    store.commit(version, records, CheckpointInfo(step=1))
    found = store.open().tensors()
    assert found["residual/1"].tolist() == [1, 1]
    assert len(found) == len(tensors_at(1)) + 2


def test_an_error_is_told_and_the_next_save_works(tmp_path):
    def breaking(operation, /, *args, **kwargs):
        if operation.__name__ == "fsync" and broken.is_set():
            raise OSError(5, "Input/output error")
        return operation(*args, **kwargs)

    broken = threading.Event()
    store = CheckpointStore(open_storage(tmp_path, call=breaking))
    save(store, 1)
    with BackgroundWriter(store) as writer:
        version = store.next_version()
        broken.set()
        writer.save(version, tensors_at(2), state_at(2))
        done = finished(writer)
        assert isinstance(done.error, PlatformError)
        assert "part-00-of-01.safetensors cannot be written: Input/output error" in str(done.error)
        assert done.records == ()
        assert list((tmp_path / f"v{version:08d}").iterdir()) == []
        broken.clear()
        writer.discard(version)
        discarded = finished(writer)
        assert discarded == WriteResult(version, seconds=discarded.seconds)
        version = store.next_version()
        writer.save(version, tensors_at(3), state_at(3))
        done = finished(writer)
        writer.commit(version, done.records, CheckpointInfo(step=3))
        assert finished(writer).manifest is not None
    assert_is(store.newest_good(), 3)
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v00000001", "v00000003"]


def test_a_failing_prune_does_not_undo_the_commit(tmp_path):
    def no_deleting(operation, /, *args, **kwargs):
        if operation.__name__ == "unlink":
            raise OSError(13, "Permission denied")
        return operation(*args, **kwargs)

    save(CheckpointStore(tmp_path), 1)
    store = CheckpointStore(open_storage(tmp_path, call=no_deleting))
    with BackgroundWriter(store) as writer:
        version = store.next_version()
        writer.save(version, tensors_at(2), state_at(2))
        writer.commit(version, finished(writer).records, CheckpointInfo(step=2), Retention(keep_last=1))
        done = finished(writer)
    assert done.manifest is not None
    assert isinstance(done.error, PlatformError)
    assert_is(store.newest_good(), 2)
    assert store.find("latest") == version


def test_a_bug_is_told_as_one(tmp_path):
    def buggy(operation, /, *args, **kwargs):
        if operation.__name__ == "write":
            raise ZeroDivisionError("oh")
        return operation(*args, **kwargs)

    with BackgroundWriter(CheckpointStore(open_storage(tmp_path, call=buggy))) as writer:
        writer.save(writer.store.next_version(), tensors_at(1), {})
        error = finished(writer).error
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    with BackgroundWriter(CheckpointStore(tmp_path)) as writer:
        with pytest.raises(UsageError, match=r"of type torch\.Tensor"):
            writer.save(1, {}, {"a": torch.ones(1)})
        with pytest.raises(UsageError, match="not a tensor"):
            writer.save(1, {"a": 3}, {})  # type: ignore[dict-item]
        assert not writer.busy
    with pytest.raises(UsageError, match="closed"):
        writer.save(1, {}, {})
    with pytest.raises(UsageError, match="part 2 of 2"):
        BackgroundWriter(CheckpointStore(tmp_path), 2, 2)
    assert list(tmp_path.iterdir()) == []


def test_closing_finishes_what_is_under_way(tmp_path):
    gate = Gate("fsync")
    store = CheckpointStore(open_storage(tmp_path, call=gate))
    os.mkdir(tmp_path / "v00000001")
    writer = BackgroundWriter(store)
    writer.save(1, tensors_at(1), state_at(1))
    assert gate.reached.wait(20)
    gate.opened.set()
    writer.close()
    writer.close()
    assert {path.name for path in (tmp_path / "v00000001").iterdir()} == {
        "part-00-of-01.safetensors",
        "state.json",
    }


def test_the_thread_is_polite(tmp_path):
    seen: list[int] = []

    def look(operation, /, *args, **kwargs):
        if operation.__name__ == "write":
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return operation(*args, **kwargs)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with BackgroundWriter(CheckpointStore(open_storage(tmp_path, call=look))) as writer:
        writer.save(writer.store.next_version(), tensors_at(1), {})
        writer.wait(20)
    assert min(seen) > before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_shares_are_a_balanced_partition(sizes, world):
    tensors = {f"t{index}": torch.empty(size) for index, size in enumerate(sizes)}
    shares = [share_of(tensors, rank, world) for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    backwards = dict(reversed(tensors.items()))
    assert shares == [share_of(backwards, rank, world) for rank in range(world)]
    loads = [sum(tensors[name].numel() for name in share) for share in shares]
    assert max(loads) <= max([sum(sizes) / world * 4 / 3, *sizes], default=0) + max(sizes, default=0) / 3


def test_share_of_a_part_that_is_not():
    with pytest.raises(UsageError):
        share_of({}, 1, 1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.leaky("torch keeps its CUDA context until the process ends")
def test_cuda_tensors_are_copied_before_they_change(tmp_path):
    store = CheckpointStore(tmp_path)
    tensors = {name: tensor.cuda() for name, tensor in tensors_at(1).items()}
    tensors["large"] = torch.ones(64 << 20, device="cuda")
    with BackgroundWriter(store) as writer:
        version = store.next_version()
        writer.save(version, tensors, {})
        for tensor in tensors.values():
            tensor.zero_()
        writer.commit(version, finished(writer).records, CheckpointInfo(step=1))
        assert finished(writer).error is None
    found = store.open().tensors()
    assert bool((found.pop("large") == 1).all())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_at(1).items())
