"""The processes that work for a run: their rows, heartbeats, claims, and what each of them did when."""
