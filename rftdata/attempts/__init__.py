"""Attempts to train a run: their hold on it, draws of batches, checkpoints, policy versions, evaluations, and stored selections."""
