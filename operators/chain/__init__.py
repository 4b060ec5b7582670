"""A chain of stages: built from YAML, and a batch's way through it."""
