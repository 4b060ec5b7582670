"""Reports read from the buffer alone: progress and results of runs, lineage of experiences, facts about the database."""
