"""What the benchmarks of staying alive share, and the benchmarks themselves.

    against_peers     the same kill -9 for Paceline, torchrun, torchft, Horovod elastic and Ray Train
    paceline_kills    200 kills in one run
    steady_state      what being supervised costs while nothing happens
    many_workers      128 workers on one machine, and how long sharding takes
    soak              minutes of random faults; what grows

Only `supervised_run` may import Paceline's Trainer. Peers know the workload and the log that they write.
"""
