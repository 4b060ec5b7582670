"""Tasksets: from a source to rows of `rft.task`, once, with stable keys.

`sources` reads rows (files and folders, Hugging Face hub, SQL queries, generators), `rows` turns rows into tasks, `splits` assigns
them to train, validation and test, `loading` stores them, `stored` reads them, `stats` reads what runs learned about them, `embeddings`
stores their vectors.
"""

from __future__ import annotations

from rftdata.tasks.loading import load_taskset
from rftdata.tasks.rows import read_tasks
from rftdata.tasks.splits import numbers_key, split_of
from rftdata.tasks.stored import list_tasksets, show_tasks, taskset_texts

__all__ = [
    "list_tasksets",
    "load_taskset",
    "numbers_key",
    "read_tasks",
    "show_tasks",
    "split_of",
    "taskset_texts",
]
