"""User functions: time limits, and processes that such a function blocks."""
