"""Attempts to train a run: draws of batches, checkpoints, policy versions, evaluations, and the fence between two attempts."""
