"""The command line: thin commands over the folders below, one message per error.

Must not decide anything itself and must not import torch when it starts.
"""
