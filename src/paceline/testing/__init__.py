"""Test tools for plug-in authors and our own tests: the transport contract, ranks as threads, leak checks,
enumerated crash points, a model of power loss, network namespaces, the gauntlet.

No other folder imports it, and a running job must not need it.
"""
