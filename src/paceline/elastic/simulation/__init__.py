"""The machine under a virtual clock and a simulated network, with members that follow the real protocol and
every fault that is modelled. Deterministic: a schedule is a function of its seed and the number of workers.

Pure Python, no threads, no sockets, no real time. Must not know the real shell or what members compute.
"""
