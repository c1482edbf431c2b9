"""Settings of the orchestrator: what is taken, and what is refused in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.aggregate.async_sgd.staleness import Staleness
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends.orchestrator.job_preparation import (
    TrainingArguments,
    check_arguments,
    read_data,
    train_config,
)
from paceline.frontends.orchestrator.orchestrator_config import (
    AggregationStrategy,
    TrainingConfig,
    read_config,
    register_aggregation,
)


def test_the_defaults_are_the_documented_ones():
    config = TrainingConfig(model_size=1000)
    assert config.gradient_clip == 1.0
    assert config.checkpoint_interval == 100
    assert config.aggregation_strategy is AggregationStrategy.ALL_REDUCE
    assert config.fault_tolerance is True
    assert config.max_worker_failures == 3
    assert config.exact is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 3  # type: ignore[misc]


def test_the_dict_that_people_write():
    config = read_config({"size": 1_000_000, "batch_size": 32, "learning_rate": 1e-3, "epochs": 10})
    assert config == TrainingConfig(model_size=1_000_000, batch_size=32, learning_rate=1e-3, epochs=10)
    assert read_config(config) is config
    assert read_config({"aggregation_strategy": "ring_all_reduce"}).aggregation_strategy is (
        AggregationStrategy.RING_ALL_REDUCE
    )
    assert read_config({"run_dir": Path("here")}).run_dir == "here"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sise": 5}, r"have no 'sise'[\s\S]*did you mean size\?[\s\S]*batch_size, learning_rate"),
        ({"size": 1000, "model_size": 1000}, "given twice"),
        ({"size": "big"}, "model_size: expected"),
        ({"size": 3}, "less than 64"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size: expected"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": True}, "epochs: expected"),
        ({"learning_rate": -1.0}, "learning_rate=-1"),
        ({"learning_rate": "fast"}, "learning_rate: expected"),
        ({"gradient_clip": 0.0}, "gradient_clip=0"),
        ({"max_worker_failures": -1}, "max_worker_failures=-1"),
        ({"fault_tolerance": "yes"}, "fault_tolerance: expected"),
        ({"aggregation_strategy": "magic"}, "is no strategy[\\s\\S]*async_sgd"),
        ({"aggregation_strategy": 7}, "is no strategy"),
        ({"staleness": Staleness(limit=3)}, "only ASYNC_SGD has old"),
        ({"staleness": 3}, "staleness is an int"),
        ({"shards": 4, "exact": False}, "only an exact sum"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps=0"),
        ({"port": 70_000}, "TrainingConfig: port=70000 is more than 65535"),
        ({"stragglers": "shoot"}, "stragglers: expected"),
        ({"bind": "0.0.0.0", "aggregation_strategy": "async_sgd"}, "bind='0.0.0.0' with ASYNC_SGD"),
        ({"backoff": 2.0, "fault_tolerance": False}, r"backoff=2.0 with fault_tolerance=False"),
        ([("size", 5)], "are a list"),
    ],
)
def test_mistakes_are_named(given, said):
    with pytest.raises(ConfigError, match=said):
        read_config(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"samples": 5}, r"have no 'samples'[\s\S]*total_samples, noise"),
        ({"total_samples": 0}, "total_samples=0"),
        ({"total_samples": 1e5}, "not a whole number"),
        ({"noise": -0.5}, "noise=-0.5"),
        (100_000, "are an int"),
    ],
)
def test_mistakes_about_the_data_are_named(given, said):
    with pytest.raises(ConfigError, match=said):
        read_data(given)


def refused(config=None, data=None, model=None, dataset=None, objective=None, optimizer=None):
    given = TrainingArguments(data, model, dataset, objective, optimizer)
    check_arguments(config or TrainingConfig(), given)


def test_what_does_not_go_together_is_refused():
    def build():
        raise AssertionError("never called")

    with pytest.raises(ConfigError, match='"size" is missing'):
        refused(data={"total_samples": 5})
    with pytest.raises(ConfigError, match='"total_samples" is missing'):
        refused(TrainingConfig(model_size=100))
    with pytest.raises(UsageError, match="no dataset="):
        refused(model=build)
    with pytest.raises(UsageError, match="no model="):
        refused(dataset=[1, 2])
    with pytest.raises(UsageError, match="no objective="):
        refused(model=build, dataset=[1, 2])
    with pytest.raises(UsageError, match="objective= and no model="):
        refused(TrainingConfig(model_size=100), {"total_samples": 5}, objective=build)
    with pytest.raises(UsageError, match="the model is an int"):
        refused(model=3, dataset=[1], objective=build)
    with pytest.raises(UsageError, match="the optimizer is 'adam'"):
        refused(TrainingConfig(model_size=100), {"total_samples": 5}, optimizer="adam")
    with pytest.raises(ConfigError, match="'size' is for what is made up"):
        refused(TrainingConfig(model_size=100), model=build, dataset=[1], objective=build)


class Nothing:
    def combine(self, context, tensor):
        pass


def test_a_strategy_of_ones_own_is_named_like_the_others():
    with pytest.raises(ConfigError, match="register_aggregation"):
        TrainingConfig(aggregation_strategy="of_this_test")
    mine = Nothing()
    register_aggregation("of_this_test", mine)
    config = TrainingConfig(aggregation_strategy="of_this_test")
    assert config.own_aggregation is mine
    assert config.strategy_name == "of_this_test"
    assert train_config(config, 2).mode == "fast"
    with pytest.raises(UsageError, match="of Paceline's own"):
        register_aggregation("async_sgd", mine)


def test_settings_of_the_training_loop_are_global():
    config = TrainingConfig(batch_size=8, epochs=2, seed=4, checkpoint_interval=None, gradient_clip=None)
    made = train_config(config, 3)
    assert (made.workers, made.global_batch, made.epochs, made.seed) == (3, 24, 2, 4)
    assert made.mode == "exact"
    assert made.clip_norm is None
    assert made.checkpoint.every_steps is made.checkpoint.every_epochs is None
    assert made.checkpoint.at_end


def test_checkpoint_interval_counts_epochs_and_steps_replace_it():
    def units(**given):
        made = train_config(TrainingConfig(**given), 2).checkpoint
        return made.every_epochs, made.every_steps

    assert units() == (100, None)
    assert units(checkpoint_interval=3) == (3, None)
    assert units(checkpoint_every_steps=20) == (None, 20)


def test_the_supervisor_listens_where_machines_can_join():
    config = TrainingConfig(bind="0.0.0.0", port=29_999, backoff=1.5, stragglers="backup")
    made = train_config(config, 2).fault_tolerance
    assert (made.bind, made.port, made.backoff, made.stragglers) == ("0.0.0.0", 29_999, 1.5, "backup")


@pytest.mark.parametrize(
    ("strategy", "algorithm"),
    [
        (AggregationStrategy.ALL_REDUCE, "auto"),
        (AggregationStrategy.RING_ALL_REDUCE, "ring"),
        (AggregationStrategy.HIERARCHICAL, "hierarchical"),
    ],
)
def test_without_the_exact_sum_a_strategy_is_an_algorithm_of_the_communication_layer(strategy, algorithm):
    made = train_config(TrainingConfig(aggregation_strategy=strategy, exact=False), 2)
    assert made.mode == "fast"
    assert made.algorithm == algorithm
    assert train_config(TrainingConfig(aggregation_strategy=strategy), 2).mode == "exact"
