"""A chain of stages: building it from YAML, and running a batch through it."""
