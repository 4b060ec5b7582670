"""Operators on experiences, one per file."""
