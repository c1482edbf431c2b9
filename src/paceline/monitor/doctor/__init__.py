"""Checks of `paceline doctor`: is this machine, are its folders and the links between hosts fit to train?

Each check returns findings and decides nothing: the command prints them. No check changes the machine.
"""
