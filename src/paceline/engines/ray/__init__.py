"""Agents on a Ray cluster: a placement group and an actor for each of them, which runs `paceline join`.

Ray decides where agents run; the supervisor decides everything about training. Ray itself is imported only
in `connection` and on nodes. Control plane: never imports torch.
"""
