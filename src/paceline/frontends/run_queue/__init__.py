"""A queue of runs over the workers of a machine or a cluster: `paceline queue`.

    queued_run         what is asked for, and what became of it; plain data
    worker_allocation  which run has how many workers: a pure function
    run_endings        what the end of a run's process means: a pure function
    queue_folder       the queue on disk: one file, two locks, a folder per run
    run_host           the parent of a run's process, which outlives the server and notes the exit code
    run_observation    what a run does now, from its locks, its exit code and its supervisor
    queue_server       carries out what the pure functions decide
    serving            the process of the server
    queue_client       what commands do: add, find, change, forget

Runs are ordinary `paceline train` processes; the queue talks to them as `paceline scale` and `stop` do. No
torch.
"""
