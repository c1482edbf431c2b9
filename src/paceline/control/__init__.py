"""The control connection between supervisor and members: messages, reconnects, liveness, the member machine.

Control plane: never imports torch. Must not know what is decided (elastic) nor trained (train).
"""
