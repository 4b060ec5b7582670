"""Batches on their way to the learner: drawn ahead, padded, reshaped for an algorithm, cut into micro-batches."""
