"""Weights from trainer ranks into live engines."""
