"""The control connection between a job's supervisor and its members: who may speak, and what is said.

Must not know who decides what (elastic/) nor what members compute (train/).
"""
