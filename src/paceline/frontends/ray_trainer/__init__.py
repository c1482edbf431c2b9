"""`paceline.RayTrainer`: training from a dict of settings on a Ray cluster or in a Tune trial, and an export
that Ray Serve loads. Ray is imported where it is used.
"""
