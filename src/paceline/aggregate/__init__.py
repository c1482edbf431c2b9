"""Combines the work of many: federated averaging and its robust forms.

Must not know parallel, engines, nor the training loop.
"""
