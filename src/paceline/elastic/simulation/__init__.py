"""Both machines, the supervisor's and the members', under a virtual clock and a simulated network, with every
fault that is modelled. Deterministic: a schedule is a function of its seed and the number of workers.

Pure Python, no threads, no sockets, no real time. Must not know the shells of real processes
(`elastic/supervisor`, `train/member`) or what members compute.
"""
