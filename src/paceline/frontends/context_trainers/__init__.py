"""Trainers on a `DistributedContext`: every rank passes its part of the data, epoch by epoch."""
