"""Predicts time, memory and cost of a run before it starts.

Must not run anything, and must not know monitor and tune.
"""
