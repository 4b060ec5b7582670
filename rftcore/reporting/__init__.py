"""The results of a run, computed from the buffer alone: the report, its tables and its learning curve."""
