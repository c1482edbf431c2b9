"""One step as a transaction: batches, gradients, their reduction over all ranks, and the update."""
