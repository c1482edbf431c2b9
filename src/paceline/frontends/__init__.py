"""The front doors: spawn, process group, launcher, trainers, orchestrator, manager.

Joins the two planes and holds no logic of its own. Must not know the command line.
"""
