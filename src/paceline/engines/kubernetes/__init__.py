"""Agents as pods of a Kubernetes cluster: manifests as plain data, and a small client of the API server.

Needs no package beside Paceline's own. Must not know what a worker computes.
"""
