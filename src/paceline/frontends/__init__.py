"""The front doors: `spawn`, the process group, `session`, `Trainer` and the orchestrator.

Joins the control plane (elastic) to training (train). Must not know the command line.
"""
