"""Optimisation steps of the trainer, beside TRL."""
