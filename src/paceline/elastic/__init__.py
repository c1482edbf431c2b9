"""Keep a job alive: a pure machine decides, the supervisor process carries its decisions out, and a
simulation drives the machine together with the member machine (`control`).

Control plane: never imports torch. Must not know train, nor what a worker computes.
"""
