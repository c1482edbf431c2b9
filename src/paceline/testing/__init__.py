"""What plug-in authors and our own tests share: contract suites, scripted faults, simulated networks.

Nobody else in Paceline imports it. Must not be needed by a running job.
"""
