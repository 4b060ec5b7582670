"""What `rft run`, `rft check` and `rft status` print about a run."""
