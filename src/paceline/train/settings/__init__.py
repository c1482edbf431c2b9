"""Settings of the user, checked: plain data without torch, and what follows from it (schedules, batches)."""
