"""The strategy of tf.distribute that a trainer runs under: made from a word, or the caller's own."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, final

from paceline.comm.rendezvous.environment import find_launch_info
from paceline.core.errors import PacelineError, PlatformError, UsageError
from paceline.core.wording import with_article
from paceline.frontends import launcher_link
from paceline.frontends.framework_trainers.framework_settings import require_package
from paceline.frontends.framework_trainers.server_ranks import ServedRanks
from paceline.frontends.framework_trainers.strategy_group import StrategyGroup
from paceline.frontends.framework_trainers.tensorflow_cluster import (
    TensorFlowCluster,
    met_by_ranks,
    named_by_environment,
    named_by_resolver,
)

INSTALL: Final = "pip install tensorflow (without a GPU: tensorflow-cpu)"
WORDS: Final = ("mirrored", "multiworker", "parameter_server")
_GIVE: Final = f"use None, {', '.join(map(repr, WORDS))}, or a strategy of tf.distribute"


@final
@dataclass
class TensorFlowJob:
    """This process's part in a TensorFlow job. `coordinator` hands steps to workers of parameter servers;
    `server`: of a rank that is no chief there."""

    tf: Any
    strategy: Any
    group: StrategyGroup
    cluster: TensorFlowCluster | None = None
    coordinator: Any = None
    served: ServedRanks | None = None
    server: Any = None

    @property
    def framework(self) -> str:
        return f"tensorflow {self.tf.__version__}"

    @property
    def is_chief(self) -> bool:
        return self.group.is_chief and self.server is None

    @property
    def replicas(self) -> int:
        """Copies of the model that train at the same time: of parameter servers, the workers."""
        if self.coordinator is not None and self.cluster is not None:
            return self.cluster.workers
        return int(self.strategy.num_replicas_in_sync) if self.strategy is not None else 0

    def close(self) -> None:
        if self.served is not None:
            self.served.close()


def join_job(strategy: Any, parameter_servers: int) -> TensorFlowJob:
    """Return this process's part in the job that `strategy` names."""
    _check(strategy, parameter_servers)
    tf = require_package("tensorflow", INSTALL)
    if strategy is not None and not isinstance(strategy, str):
        if not isinstance(strategy, tf.distribute.Strategy):
            raise UsageError(f"strategy is {with_article(strategy)}", remedy=_GIVE)
        return _with_own(tf, strategy)
    word = strategy or _usual(os.environ)
    if word == "mirrored":
        _refuse_several_ranks(os.environ)
        return TensorFlowJob(tf, _mirrored(tf), StrategyGroup(tf, None, 0, 1))
    kind = cast(Literal["multiworker", "parameter_server"], word)
    cluster = named_by_environment(os.environ) or met_by_ranks(kind, parameter_servers, os.environ)
    if ("ps" in cluster.jobs) != (kind == "parameter_server"):
        raise UsageError(
            f'strategy="{kind}", and the cluster of TF_CONFIG has {", ".join(cluster.jobs)}',
            remedy="a cluster of parameter servers has chief, ps and worker, any other has worker alone",
        )
    if kind == "multiworker":
        made = _collective(tf)
        return TensorFlowJob(tf, made, StrategyGroup(tf, made, cluster.rank, cluster.workers), cluster)
    return _parameter_servers(tf, cluster)


def _check(strategy: Any, parameter_servers: int) -> None:
    if isinstance(strategy, str) and strategy not in WORDS:
        raise UsageError(f"strategy={strategy!r} is unknown", remedy=_GIVE)
    if not isinstance(parameter_servers, int) or isinstance(parameter_servers, bool) or parameter_servers < 1:
        raise UsageError(
            f"parameter_servers={parameter_servers!r}: it counts processes", remedy="give 1 or more"
        )


def _usual(environment: MutableMapping[str, str]) -> str:
    cluster = named_by_environment(environment)
    if cluster is not None:
        return "parameter_server" if "ps" in cluster.jobs else "multiworker"
    return "multiworker" if find_launch_info(environment).world_size > 1 else "mirrored"


def _refuse_several_ranks(environment: MutableMapping[str, str]) -> None:
    info = find_launch_info(environment)
    if info.world_size > 1:
        raise UsageError(
            f'strategy="mirrored" in rank {info.rank} of {info.world_size}: each of them would train alone',
            remedy='use strategy="multiworker", or start one process',
        )


def _mirrored(tf: Any) -> Any:
    """Return MirroredStrategy over all GPUs, else the strategy of one device."""
    if not tf.config.list_logical_devices("GPU"):
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    return tf.distribute.MirroredStrategy()


def _collective(tf: Any) -> Any:
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise UsageError(
            f"MultiWorkerMirroredStrategy cannot be made: {error}",
            remedy="make the trainer first, before any dataset, tensor or model of TensorFlow",
        ) from error


def _with_own(tf: Any, strategy: Any) -> TensorFlowJob:
    """Take the caller's own strategy."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        cluster = named_by_environment(os.environ)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        return TensorFlowJob(tf, strategy, StrategyGroup(tf, None, 0, 1), cluster, coordinator)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        cluster = named_by_resolver(strategy.cluster_resolver)  # TF_CONFIG's where it was made without one
        if cluster is not None:
            return TensorFlowJob(
                tf, strategy, StrategyGroup(tf, strategy, cluster.rank, cluster.workers), cluster
            )
    return TensorFlowJob(tf, strategy, StrategyGroup(tf, None, 0, 1))


def _parameter_servers(tf: Any, cluster: TensorFlowCluster) -> TensorFlowJob:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.role != "chief":
        # As TensorFlow's guide has it: a worker must not fail when another one does.
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=cluster.role, task_index=cluster.index, protocol="grpc"
        )
        return TensorFlowJob(tf, None, StrategyGroup(tf, None, cluster.rank, 1), cluster, server=server)
    served = None
    if cluster.listener is not None and cluster.meeting is not None:
        servers = len(cluster.jobs["ps"])
        served = ServedRanks(
            cluster.listener, cluster.meeting[2], servers, len(cluster.processes) - 1 - servers
        )
    try:
        if served is not None:
            served.await_all()
            serving = 1 + len(cluster.jobs["ps"])
            # Without a worker the chief would wait for one in TensorFlow, for an hour.
            launcher_link.keep_survivors(range(serving), one_of=range(serving, len(cluster.processes)))
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    except BaseException as error:
        if served is not None:
            served.close()
        if isinstance(error, PacelineError) or not isinstance(error, Exception):
            raise
        raise PlatformError(
            f"the cluster of parameter servers cannot be reached: {type(error).__name__}: {error}",
            remedy="see the output of the servers and workers, and whether the chief reaches their ports",
        ) from error
    return TensorFlowJob(tf, strategy, StrategyGroup(tf, None, 0, 1), cluster, coordinator, served)
