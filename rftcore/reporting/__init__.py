"""What a run achieved, from the buffer alone: the report, its tables and its learning curve."""
