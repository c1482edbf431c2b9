"""The worker as a member of a supervised run: shell of the member machine, messages, fault injection."""
