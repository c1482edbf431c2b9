"""Searches for hyperparameters over many runs.

Must not know monitor and plan, nor how a run is started.
"""
