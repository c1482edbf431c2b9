"""Sockets, processes and files around the machine: the supervisor process, its launcher in the caller, the
agent of another host, the client of tools. Views, replacements and blame are decided in elastic/machine."""
