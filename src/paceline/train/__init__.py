"""The training loop: steps as transactions, samples to weights.

Must not know who keeps the job alive (elastic), where processes run (engines), nor classic.
"""
