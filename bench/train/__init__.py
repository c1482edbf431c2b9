"""What the training benchmarks share: models, the work to do, and the hand-written loops and frameworks that
Paceline is measured against. Nothing here but `paceline_loop` and `bits` may import Paceline's Trainer: a
peer must run as it would without Paceline.
"""
