"""Readers while a run saves and deletes: every one gets a whole checkpoint, at any moment."""

from __future__ import annotations

import threading

import pytest
from tests.checkpoint.saving import assert_is, save

from paceline.checkpoint.manifest import CheckpointDamage
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.core.storage.open_storage import open_storage

KEEP_ONE = Retention(keep_last=1)


def test_readers_in_threads_while_a_run_saves_and_prunes(tmp_path):
    url = str(tmp_path / "run")
    writer = CheckpointStore(url)
    save(writer, 1, retention=KEEP_ONE)
    over = threading.Event()
    trouble: list[object] = []
    counts = [0, 0, 0]

    def read(index: int) -> None:
        store = CheckpointStore(url)
        last = 0
        try:
            while not over.is_set():
                found = store.newest_good(trouble.append) if index else store.open("latest")
                assert found is not None
                assert found.manifest.info.step >= last
                last = found.manifest.info.step
                assert_is(found, last)
                counts[index] += 1
        except BaseException as error:
            trouble.append(error)

    readers = [threading.Thread(target=read, args=(index,)) for index in range(len(counts))]
    for reader in readers:
        reader.start()
    try:
        for step in range(2, 40):
            save(writer, step, retention=KEEP_ONE)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert trouble == []
    assert all(counts)


@pytest.mark.parametrize("which", ["newest_good", "latest"])
@pytest.mark.parametrize("overtaken", range(1, 12))
def test_a_run_that_saves_and_deletes_faster_than_one_reads(tmp_path, which, overtaken):
    """Before each of the reader's first calls a newer checkpoint is saved and the old one deleted."""
    writer = CheckpointStore(tmp_path)
    save(writer, 1)
    calls = 0

    def interrupted(operation, /, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls <= overtaken:
            save(writer, 1 + calls, retention=KEEP_ONE)
        return operation(*args, **kwargs)

    store = CheckpointStore(open_storage(tmp_path, call=interrupted))
    found = store.open("latest") if which == "latest" else store.newest_good()
    assert found is not None
    assert_is(found, found.manifest.info.step)
    assert calls > overtaken


def test_a_checkpoint_deleted_at_any_moment_of_reading_it(tmp_path):
    """A newer one is saved and the old one deleted just before call n of the reader, for every n."""
    number = 0
    while True:
        number += 1
        url = tmp_path / f"run{number}"
        writer = CheckpointStore(url)
        save(writer, 1)
        calls = 0

        def interrupted(operation, /, *args, writer=writer, number=number, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                save(writer, 2, retention=KEEP_ONE)
            return operation(*args, **kwargs)

        damage: list[CheckpointDamage] = []
        found = CheckpointStore(open_storage(url, call=interrupted)).newest_good(damage.append)
        assert damage == []
        assert found is not None
        assert_is(found, found.manifest.info.step)
        if calls < number:
            break
    assert number > 15


def test_tensors_outlive_the_files(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    save(store, 1)
    found = store.open()
    store.discard(1)
    assert_is(found, 1)
