"""The loss that goes with the targets, and a loss function of the caller's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from paceline.core.errors import UsageError
from paceline.data.sources import as_source
from paceline.frontends import loss_inference
from paceline.train.objective import Objective
from paceline.train.step_info import StepInfo


@pytest.mark.parametrize(
    ("targets", "kind", "reason"),
    [
        (torch.tensor([0, 2, 1]), nn.CrossEntropyLoss, "whole numbers"),
        (torch.tensor([0, 2, 1], dtype=torch.uint8), nn.CrossEntropyLoss, "whole numbers"),
        (torch.tensor([0, 2, 1], dtype=torch.int32), loss_inference.WholeNumberLoss, "whole numbers"),
        (torch.eye(3), nn.CrossEntropyLoss, "one-hot rows"),
        (torch.eye(3, dtype=torch.int64), loss_inference.WholeNumberLoss, "one-hot rows"),
        (torch.tensor([[1, 2], [0, 1]]), nn.CrossEntropyLoss, "whole numbers"),
        (torch.tensor([[1.0, 0.0], [1.0, 1.0]]), nn.MSELoss, "float32 numbers"),
        (torch.tensor([[1.0], [0.0]]), nn.MSELoss, "float32 numbers"),
        (torch.tensor([0.5, 2.5], dtype=torch.float64), nn.MSELoss, "float64 numbers"),
        (torch.tensor([True, False]), loss_inference.BooleanLoss, "booleans"),
    ],
)
def test_the_loss_follows_from_the_targets(targets: Tensor, kind: type, reason: str) -> None:
    inferred = loss_inference.infer_loss(targets)
    assert type(inferred.loss) is kind
    assert reason in inferred.reason
    Objective(inferred.loss)  # `Trainer` takes it


def test_whole_numbers_of_any_kind_are_scored_as_classes() -> None:
    output, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    expected = F.cross_entropy(output, target)
    for given in (target.int(), target.short(), F.one_hot(target)):
        loss = loss_inference.infer_loss(given).loss
        torch.testing.assert_close(loss(output, given), expected)
        scored = Objective(loss).evaluate(nn.Identity(), (output, given), StepInfo())
        assert scored.metrics["accuracy"] == (output.argmax(1) == target).float().mean()
    # Tokens: a class for each place of a row.
    output, target = torch.randn(4, 3, 2), torch.tensor([[0, 1], [1, 0]] * 2)
    loss = loss_inference.infer_loss(target).loss
    assert torch.equal(loss(output, target), F.cross_entropy(output, target))


def test_booleans_are_scored_as_logits() -> None:
    output, target = torch.tensor([0.3, -2.0]), torch.tensor([True, False])
    expected = F.binary_cross_entropy_with_logits(output, target.float())
    assert torch.equal(loss_inference.BooleanLoss()(output, target), expected)


@pytest.mark.parametrize("targets", [["a", "b"], torch.zeros(2, dtype=torch.complex64)])
def test_other_targets_need_a_loss(targets: Any) -> None:
    with pytest.raises(UsageError, match="there is no loss_fn, and the targets are") as info:
        loss_inference.infer_loss(targets)
    assert "loss_fn=" in info.value.remedy


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), index % 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("read before the run")


def test_a_few_samples_are_read_and_no_generator_moves() -> None:
    before = torch.get_rng_state()
    assert loss_inference.first_targets(as_source(Augmented())).tolist() == [0, 1, 0, 1]
    assert torch.equal(torch.get_rng_state(), before)
    assert loss_inference.first_targets(as_source((torch.ones(2, 3), torch.ones(2)))).shape == (2,)


def test_data_that_cannot_be_looked_at() -> None:
    with pytest.raises(UsageError, match="an iterable dataset is not read"):
        loss_inference.first_targets(as_source(Endless()))
    with pytest.raises(UsageError, match="no sample") as info:
        loss_inference.first_targets(as_source((torch.ones(0, 3), torch.ones(0))))
    assert info.value.remedy == "give data with at least one sample"


def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


def on_model(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).mean()
    return loss


def test_a_function_of_output_and_target_is_a_loss_here() -> None:
    batch = (torch.ones(4, 2), torch.zeros(4, 2))
    for given in (absolute, lambda y_hat, y: absolute(y_hat, y), partial(absolute)):
        scored = Objective(loss_inference.as_objective(given)).score(nn.Identity(), batch, StepInfo())
        assert scored.loss == 1.0
    for kept in (nn.MSELoss(), F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1), on_model):
        assert loss_inference.as_objective(kept) is kept
    with pytest.raises(UsageError, match="loss_fn is a str"):
        loss_inference.as_objective("mse")  # type: ignore[arg-type]
