"""Distributed learning without gradients: k-means and forests.

Must not know train and elastic.
"""
