"""What differs between two checkpoints, and one as a plain file."""

from __future__ import annotations

import math
import os

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.saving import save, tensors_at, write_part, write_state

from paceline.checkpoint.compare import StateChange, TensorChange, compare
from paceline.checkpoint.loader import Checkpoint
from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import UsageError


def saved(store: CheckpointStore, tensors: dict[str, torch.Tensor], state: dict[str, object]) -> Checkpoint:
    version = store.next_version()
    records = [write_part(store, version, 0, 1, tensors), write_state(store, version, state)]
    store.commit(version, records, CheckpointInfo(step=1))
    return store.open(version)


def test_the_same_state_written_by_other_workers_is_no_difference(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, parts=1)
    save(store, 1, parts=3)
    difference = store.diff(1, 2)
    assert difference.empty
    assert difference.same == len(tensors_at(1))


def test_every_kind_of_difference(tmp_path):
    store = CheckpointStore(tmp_path)
    nan = torch.tensor([math.nan, 0.0, 1.0])
    before = saved(
        store,
        {"gone": nan, "a": nan, "b": torch.tensor([1.0, 2.0]), "shape": torch.ones(2), "e": torch.ones(0)},
        {"step": 1, "list": [1, 2, (3, math.nan)], "gone": True},
    )
    after = saved(
        store,
        {"a": nan, "b": torch.tensor([1.0, 2.5]), "shape": torch.ones(2, 1), "new": nan, "e": torch.ones(0)},
        {"step": 2, "list": [1, 2, (4, math.nan)], "new": {"x": 1}},
    )
    found = compare(before, after)
    assert (found.added, found.removed, found.same) == (("new",), ("gone",), 2)
    assert found.changed == (
        TensorChange("b", "float32[2]", "float32[2]", 1, 0.5),
        TensorChange("shape", "float32[2]", "float32[2, 1]", None, None),
    )
    assert found.state == (
        StateChange("state['step']", 1, 2),
        StateChange("state['list'][2][0]", 3, 4),
        StateChange("state['gone']", True, None),
        StateChange("state['new']", None, {"x": 1}),
    )


def test_equal_means_equal_bits(tmp_path):
    store = CheckpointStore(tmp_path)
    before = saved(store, {"zero": torch.tensor([0.0]), "flag": torch.tensor([True, False])}, {"x": 0.0})
    after = saved(store, {"zero": torch.tensor([-0.0]), "flag": torch.tensor([True, True])}, {"x": -0.0})
    found = compare(before, after)
    assert [(change.name, change.elements, change.largest) for change in found.changed] == [
        ("flag", 1, 1.0),
        ("zero", 1, 0.0),
    ]
    assert len(found.state) == 1


@pytest.mark.parametrize("everything", [False, True])
def test_plain_files(tmp_path, everything):
    store = CheckpointStore(tmp_path / "run")
    save(store, 3)
    expected = {
        name if everything else name.removeprefix("model/"): tensor
        for name, tensor in tensors_at(3).items()
        if everything or name.startswith("model/")
    }
    one = store.export("latest", tmp_path / "out" / "model.safetensors", everything=everything)
    two = store.export("latest", tmp_path / "out" / "model.pt", format="torch", everything=everything)
    for found in (load_file(one), torch.load(two, weights_only=True)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sorted(os.listdir(tmp_path / "out")) == ["model.pt", "model.safetensors"]


def test_a_module_loads_what_was_exported(tmp_path):
    module = torch.nn.Linear(3, 2)
    store = CheckpointStore(tmp_path / "run")
    saved(store, {f"model/{name}": tensor for name, tensor in module.state_dict().items()}, {})
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(torch.load(store.export(1, tmp_path / "m.pt", format="torch"), weights_only=True))
    assert torch.equal(module.weight, other.weight)


def test_a_file_that_exists_is_not_replaced_unasked(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    save(store, 3)
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists already"):
        store.export(1, target)
    assert target.read_bytes() == b"precious"
    store.export(1, target, overwrite=True)
    assert "weight" in load_file(target)
    with pytest.raises(UsageError, match="exists already"):
        store.export(1, tmp_path, overwrite=True)


def test_bad_exports(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    saved(store, {"optimizer/x": torch.ones(1)}, {})
    with pytest.raises(UsageError, match="begins with 'model/'"):
        store.export(1, tmp_path / "x")
    with pytest.raises(UsageError, match="format='onnx'"):
        store.export(1, tmp_path / "x", format="onnx")  # type: ignore[arg-type]


class Tied(torch.nn.Module):
    """A weight with two names, a buffer that state_dict leaves out, and a complex one."""

    mask: torch.Tensor
    waves: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex128))


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_an_export_has_the_names_of_the_state_dict(tmp_path, format):
    module = Tied()
    module.waves.fill_(2j)
    tensors = {
        "model/embed.weight": module.embed.weight.detach(),
        "model/mask": module.mask,
        "model/waves": torch.view_as_real(module.waves),
    }
    names = {"aliases": {"head.weight": "embed.weight"}, "not_saved": ["mask"]}
    store = CheckpointStore(tmp_path / "run")
    saved(store, tensors, {"model": names, "pairs": ["model/waves"]})
    file = store.export(1, tmp_path / "out", format=format)
    if format == "torch":
        other = Tied()
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other.waves, module.waves)
        assert torch.equal(other.head.weight, module.head.weight)
    else:
        found = load_file(file)
        assert sorted(found) == ["embed.weight", "head.weight", "waves"]
        assert torch.equal(torch.view_as_complex(found["waves"]), module.waves)
