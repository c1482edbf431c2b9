"""The supervisor process: sockets, processes and files around the machine. Decides nothing."""
