"""`paceline.DistributedTrainingOrchestrator`: train from inside an event loop, and observe the training.

    orchestrator         what users call; the only part that knows asyncio
    orchestrator_config  its settings
    job_preparation      from the user's arguments to a job that can be started
    sync_job             the processes of synchronous training (aggregate/async_sgd has those of ASYNC_SGD)
    run_tracker          the run's journal as workers, shards, metrics and versions; results as plain dicts
    observed_state       these workers, shards, metrics and versions, and the shards' checksums
    synthetic_task       a model and a task of given sizes

Importing `orchestrator` imports torch, so that no event loop waits for that later.
"""
