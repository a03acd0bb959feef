"""One optimiser step from the files of its ranks and micro-batches."""
