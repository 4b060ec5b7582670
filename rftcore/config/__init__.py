"""The configuration of a run: its sections, how they are read from YAML, and what of them can be validated without disk, network or GPU."""
