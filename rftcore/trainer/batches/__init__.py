"""Batches on their way to the learner: drawn ahead, laid out with padding, reshaped for an algorithm, cut into micro-batches."""
