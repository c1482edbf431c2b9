"""Keep a job alive: a pure machine decides, the supervisor process acts, a simulation tests both.

Control plane: never imports torch. Must not know train, nor what a worker computes.
"""
