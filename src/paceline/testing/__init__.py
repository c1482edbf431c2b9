"""What plug-in authors and our own tests share: contract suites, scripted faults, simulated networks.

No other folder imports it, and a running job must not need it.
"""
