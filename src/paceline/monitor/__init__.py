"""Watches a run through its journal: terminal view, dashboard, report.

Reads events and nothing else. Must not know how the run is kept alive, nor tune and plan.
"""
