"""Tasksets: from a source to rows of `rft.task`, once, with stable keys; and what a task pipeline made of them.

`sources` reads rows (files and folders, Hugging Face hub, SQL queries, generators), `rows` makes tasks of rows, `loading` stores
them, `verdicts` reads them in batches for a task pipeline and stores what it decided, `embeddings` keeps their vectors.
"""

from __future__ import annotations

from rftdata.tasks.loading import list_tasksets, load_taskset, taskset_texts
from rftdata.tasks.rows import default_split_key, read_tasks, split_of
from rftdata.tasks.verdicts import show_tasks

__all__ = [
    "default_split_key",
    "list_tasksets",
    "load_taskset",
    "read_tasks",
    "show_tasks",
    "split_of",
    "taskset_texts",
]
