"""Training scripts for other frameworks, each as a user of that framework would write it: one file per peer.

A script is started with the folder for its log and checkpoints and the number of steps. It imports its
framework at the top; whether that is installed is asked before it is started. Paceline's only part in them is
the hash of the final weights.
"""
