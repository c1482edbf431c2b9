"""Agents over ssh, on the hosts of a list or a host file; the system's own `ssh` connects to them.

Control plane: never imports torch. Must not know what a worker computes.
"""
