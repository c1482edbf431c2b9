"""Trackers: observers that write what a run measures to csv, TensorBoard, MLflow or Weights & Biases.

A tracker's service may be slow, fail or hang; training neither waits for it nor ends with it.
"""
