"""Paceline trains models on many workers, and a failure leaves no trace.

This module only maps public names to the modules that hold them and loads each on first use, so that
`import paceline` costs milliseconds and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline import (
        gradient_checkpointing as gradient_checkpointing,
        metrics as metrics,
        tune as tune,
    )
    from paceline.aggregate.async_sgd.staleness import Staleness as Staleness
    from paceline.comm.compression import (
        PowerSGD as PowerSGD,
        cast_gradients as cast_gradients,
        quantize_gradients as quantize_gradients,
        sparsify_gradients as sparsify_gradients,
    )
    from paceline.comm.context import DistributedContext as DistributedContext
    from paceline.comm.ops import ReduceOp as ReduceOp
    from paceline.core.chaos_spec import Chaos as Chaos
    from paceline.core.errors import (
        CommTimeoutError as CommTimeoutError,
        ConfigError as ConfigError,
        CorruptDataError as CorruptDataError,
        DisagreementError as DisagreementError,
        GroupInterruptedError as GroupInterruptedError,
        InternalError as InternalError,
        PacelineError as PacelineError,
        PeerError as PeerError,
        PeerLostError as PeerLostError,
        PlatformError as PlatformError,
        RankFailedError as RankFailedError,
        RendezvousError as RendezvousError,
        ReplicasDifferError as ReplicasDifferError,
        ResourceError as ResourceError,
        UnavailableError as UnavailableError,
        UsageError as UsageError,
        WireError as WireError,
    )
    from paceline.data.checked import CheckedShards as CheckedShards, write_shards as write_shards
    from paceline.data.orders import LengthBuckets as LengthBuckets, WeightedOrder as WeightedOrder
    from paceline.data.partition import (
        DataPartitioner as DataPartitioner,
        balance_workload as balance_workload,
    )
    from paceline.data.sampler import DistributedSampler as DistributedSampler
    from paceline.engines.kubernetes.kubernetes_engine import Kubernetes as Kubernetes
    from paceline.engines.mpi.mpi_engine import Mpi as Mpi
    from paceline.engines.ray.ray_engine import Ray as Ray
    from paceline.engines.slurm.slurm_engine import Slurm as Slurm
    from paceline.engines.ssh.ssh_engine import Ssh as Ssh
    from paceline.frontends.collective_functions import (
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        barrier as barrier,
        broadcast as broadcast,
        gather as gather,
        recv as recv,
        reduce as reduce,
        reduce_scatter as reduce_scatter,
        scatter as scatter,
        send as send,
    )
    from paceline.frontends.context_trainers.adaptive_trainer import (
        DistributedAdaptiveTrainer as DistributedAdaptiveTrainer,
    )
    from paceline.frontends.context_trainers.distributed_trainer import (
        DistributedTrainer as DistributedTrainer,
    )
    from paceline.frontends.context_trainers.neural_net_trainer import (
        DistributedNeuralNetTrainer as DistributedNeuralNetTrainer,
    )
    from paceline.frontends.context_trainers.strategies import (
        AggregationMethod as AggregationMethod,
        TrainingStrategy as TrainingStrategy,
    )
    from paceline.frontends.ddp_trainer.ddp_trainer import PyTorchDDPTrainer as PyTorchDDPTrainer
    from paceline.frontends.ddp_trainer.distributed_config import DistributedConfig as DistributedConfig
    from paceline.frontends.framework_trainers.backend_choice import make_trainer as make_trainer
    from paceline.frontends.framework_trainers.horovod_trainer import HorovodTrainer as HorovodTrainer
    from paceline.frontends.framework_trainers.tensorflow_trainer import (
        TensorFlowDistributedTrainer as TensorFlowDistributedTrainer,
    )
    from paceline.frontends.launcher.distributed_launcher import (
        DistributedLauncher as DistributedLauncher,
        launch_distributed_training as launch_distributed_training,
    )
    from paceline.frontends.launcher.launch_config import LaunchConfig as LaunchConfig
    from paceline.frontends.manager.manager_config import (
        CheckpointGranularity as CheckpointGranularity,
        ManagerConfig as ManagerConfig,
    )
    from paceline.frontends.manager.step_metrics import StepMetrics as StepMetrics
    from paceline.frontends.manager.training_manager import (
        DistributedTrainingManager as DistributedTrainingManager,
    )
    from paceline.frontends.orchestrator.observed_state import (
        DataShard as DataShard,
        WorkerNode as WorkerNode,
        WorkerState as WorkerState,
    )
    from paceline.frontends.orchestrator.orchestrator import (
        DistributedTrainingOrchestrator as DistributedTrainingOrchestrator,
    )
    from paceline.frontends.orchestrator.orchestrator_config import (
        AggregationStrategy as AggregationStrategy,
        TrainingConfig as TrainingConfig,
        register_aggregation as register_aggregation,
    )
    from paceline.frontends.process_group import (
        destroy_process_group as destroy_process_group,
        get_distributed_info as get_distributed_info,
        get_rank as get_rank,
        get_world_size as get_world_size,
        init_process_group as init_process_group,
        is_initialized as is_initialized,
    )
    from paceline.frontends.ray_trainer.ray_trainer import RayTrainer as RayTrainer
    from paceline.frontends.ray_trainer.tune_report import TuneReport as TuneReport
    from paceline.frontends.saved_models import load_model as load_model
    from paceline.frontends.session import session as session
    from paceline.frontends.spawn import spawn as spawn
    from paceline.frontends.trainer import Trainer as Trainer
    from paceline.frontends.tuner.distributed_tuner import DistributedTuner as DistributedTuner
    from paceline.monitor.report import write_report as write_report
    from paceline.monitor.trackers.csv_log import CsvLog as CsvLog
    from paceline.monitor.trackers.mlflow import MLflow as MLflow
    from paceline.monitor.trackers.tensorboard import TensorBoard as TensorBoard
    from paceline.monitor.trackers.wandb import WeightsAndBiases as WeightsAndBiases
    from paceline.parallel.ddp import (
        DistributedDataParallel as DistributedDataParallel,
        no_sync as no_sync,
    )
    from paceline.train.callbacks import Modifier as Modifier, Observer as Observer
    from paceline.train.history import History as History
    from paceline.train.loop.checkpoint_scope import checkpoint_scope as checkpoint_scope
    from paceline.train.memory_pool import memory_pool_scope as memory_pool_scope
    from paceline.train.settings.evaluation_config import EvaluationConfig as EvaluationConfig
    from paceline.train.settings.learning_rate_scaling import scale_learning_rate as scale_learning_rate
    from paceline.train.settings.train_config import (
        CheckpointConfig as CheckpointConfig,
        DynamicBatch as DynamicBatch,
        EarlyStopping as EarlyStopping,
        FaultTolerance as FaultTolerance,
        GradientCompression as GradientCompression,
        LossScaling as LossScaling,
        TrainConfig as TrainConfig,
    )
    from paceline.train.state.model_state import state_hash as state_hash
    from paceline.train.state.weight_averages import EMA as EMA, SWA as SWA
    from paceline.train.step.aggregation_registry import Aggregation as Aggregation
    from paceline.train.step_info import StepInfo as StepInfo
    from paceline.train.stop_signals import (
        STOPPED_EXIT_CODE as STOPPED_EXIT_CODE,
        SUPERVISOR_LOST_EXIT_CODE as SUPERVISOR_LOST_EXIT_CODE,
        Stopped as Stopped,
    )


if TYPE_CHECKING:
    __version__: str  # read from core.version when asked for, as all other names are

_MODULES = {
    "paceline.comm.compression": ("PowerSGD", "cast_gradients", "quantize_gradients", "sparsify_gradients"),
    "paceline.comm.context": ("DistributedContext",),
    "paceline.comm.ops": ("ReduceOp",),
    "paceline.core.chaos_spec": ("Chaos",),
    "paceline.core.errors": (
        "CommTimeoutError",
        "ConfigError",
        "CorruptDataError",
        "DisagreementError",
        "GroupInterruptedError",
        "InternalError",
        "PacelineError",
        "PeerError",
        "PeerLostError",
        "PlatformError",
        "RankFailedError",
        "RendezvousError",
        "ReplicasDifferError",
        "ResourceError",
        "UnavailableError",
        "UsageError",
        "WireError",
    ),
    "paceline.engines.kubernetes.kubernetes_engine": ("Kubernetes",),
    "paceline.frontends.framework_trainers.backend_choice": ("make_trainer",),
    "paceline.frontends.collective_functions": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
        "reduce_scatter",
        "scatter",
        "send",
    ),
    "paceline.aggregate.async_sgd.staleness": ("Staleness",),
    "paceline.frontends.context_trainers.adaptive_trainer": ("DistributedAdaptiveTrainer",),
    "paceline.frontends.context_trainers.distributed_trainer": ("DistributedTrainer",),
    "paceline.frontends.context_trainers.neural_net_trainer": ("DistributedNeuralNetTrainer",),
    "paceline.engines.mpi.mpi_engine": ("Mpi",),
    "paceline.engines.slurm.slurm_engine": ("Slurm",),
    "paceline.engines.ssh.ssh_engine": ("Ssh",),
    "paceline.frontends.context_trainers.strategies": ("AggregationMethod", "TrainingStrategy"),
    "paceline.frontends.ddp_trainer.ddp_trainer": ("PyTorchDDPTrainer",),
    "paceline.frontends.ddp_trainer.distributed_config": ("DistributedConfig",),
    "paceline.frontends.framework_trainers.horovod_trainer": ("HorovodTrainer",),
    "paceline.frontends.framework_trainers.tensorflow_trainer": ("TensorFlowDistributedTrainer",),
    "paceline.frontends.launcher.distributed_launcher": (
        "DistributedLauncher",
        "launch_distributed_training",
    ),
    "paceline.frontends.launcher.launch_config": ("LaunchConfig",),
    "paceline.frontends.manager.manager_config": ("CheckpointGranularity", "ManagerConfig"),
    "paceline.frontends.manager.step_metrics": ("StepMetrics",),
    "paceline.frontends.manager.training_manager": ("DistributedTrainingManager",),
    "paceline.frontends.orchestrator.observed_state": ("DataShard", "WorkerNode", "WorkerState"),
    "paceline.frontends.orchestrator.orchestrator": ("DistributedTrainingOrchestrator",),
    "paceline.frontends.orchestrator.orchestrator_config": (
        "AggregationStrategy",
        "TrainingConfig",
        "register_aggregation",
    ),
    "paceline.train.step.aggregation_registry": ("Aggregation",),
    "paceline.frontends.process_group": (
        "destroy_process_group",
        "get_distributed_info",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "is_initialized",
    ),
    "paceline.data.checked": ("CheckedShards", "write_shards"),
    "paceline.data.partition": ("DataPartitioner", "balance_workload"),
    "paceline.data.sampler": ("DistributedSampler",),
    "paceline.engines.ray.ray_engine": ("Ray",),
    "paceline.frontends.ray_trainer.ray_trainer": ("RayTrainer",),
    "paceline.frontends.ray_trainer.tune_report": ("TuneReport",),
    "paceline.frontends.saved_models": ("load_model",),
    "paceline.frontends.session": ("session",),
    "paceline.frontends.spawn": ("spawn",),
    "paceline.frontends.trainer": ("Trainer",),
    "paceline.frontends.tuner.distributed_tuner": ("DistributedTuner",),
    "paceline.parallel.ddp": ("DistributedDataParallel", "no_sync"),
    "paceline.train.callbacks": ("Modifier", "Observer"),
    "paceline.train.settings.evaluation_config": ("EvaluationConfig",),
    "paceline.train.settings.learning_rate_scaling": ("scale_learning_rate",),
    "paceline.train.settings.train_config": (
        "CheckpointConfig",
        "DynamicBatch",
        "EarlyStopping",
        "FaultTolerance",
        "GradientCompression",
        "LossScaling",
        "TrainConfig",
    ),
    "paceline.train.history": ("History",),
    "paceline.train.loop.checkpoint_scope": ("checkpoint_scope",),
    "paceline.train.memory_pool": ("memory_pool_scope",),
    "paceline.monitor.report": ("write_report",),
    "paceline.monitor.trackers.csv_log": ("CsvLog",),
    "paceline.monitor.trackers.mlflow": ("MLflow",),
    "paceline.monitor.trackers.tensorboard": ("TensorBoard",),
    "paceline.monitor.trackers.wandb": ("WeightsAndBiases",),
    "paceline.train.stop_signals": ("STOPPED_EXIT_CODE", "SUPERVISOR_LOST_EXIT_CODE", "Stopped"),
    "paceline.train.state.model_state": ("state_hash",),
    "paceline.data.orders": ("LengthBuckets", "WeightedOrder"),
    "paceline.train.step_info": ("StepInfo",),
    "paceline.train.state.weight_averages": ("EMA", "SWA"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
# Thin modules of public names, found below `paceline` without an import of their own.
_HOME |= {
    module.removeprefix("paceline."): module
    for module in (
        "paceline.gradient_checkpointing",
        "paceline.metrics",
        "paceline.torch_backend",
        "paceline.tune",
    )
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("paceline.core.version").VERSION
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    found = importlib.import_module(module)
    value = found if module == f"paceline.{name}" else getattr(found, name)
    # The next access finds it without coming here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
