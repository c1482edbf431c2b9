"""Combines the work of many: ways of one's own to join gradients, asynchronous SGD; federated averaging and
its robust forms.

Must not know parallel, engines, nor the training loop.
"""
