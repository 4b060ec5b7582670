"""Whole runs to a held-out score, beside TRL's."""
