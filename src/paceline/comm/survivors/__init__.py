"""Groups of processes that have no supervisor and lose some of their members: who lives, and where the rest
meets again. Knows nothing of what the processes compute."""
