"""Step-by-step training: the caller's own loop over steps, error codes, and repair at its request.

Translates `ManagerConfig` into the settings of every other run and holds the group; steps and their repair
are in train/loop/stepwise_run.py, the meeting of the survivors is in comm/survivors/survivor_meeting.py.
"""
