"""Keeps a job alive: one pure machine that decides, one thin shell that acts.

Control plane: never imports torch. Must not know train and classic, nor what a worker computes.
"""
