"""Training: settings, one step, the state of a run, the loop, and a worker's membership in a job.

`settings` what the user chooses; `step` one step as a transaction; `state` what a run is, its checkpoints and
its folder; `loop` the run and what one process does with it; `member` a worker under a supervisor. Each
imports only those before it. Must not know who keeps the job alive (elastic) nor where processes run
(engines).
"""
