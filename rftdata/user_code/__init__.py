"""Functions of the user: time limits, and processes that such a function blocks."""
