"""What the user chooses, checked: plain data without torch, and what follows from it (schedules, batches)."""
