"""Trainers that run on other frameworks: Horovod, TensorFlow.

    framework_run         what Paceline adds to a loop that is not its own: folder, journal, trackers,
                          verdicts, history
    framework_checkpoints  its verified checkpoints
    framework_settings    the run's settings, from DistributedConfig, arguments and `paceline train`
    framework_overrides   which settings of `paceline train` such a run has
    horovod_*             HorovodTrainer, under horovodrun
    tensorflow_*          TensorFlowDistributedTrainer, under a strategy of tf.distribute

A framework's own package is imported where a trainer is made, and nowhere else.
"""
