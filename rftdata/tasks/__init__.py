"""Tasksets: from a source to rows of `rft.task`, once, with stable keys; and the results of a task pipeline.

`sources` reads rows (files and folders, Hugging Face hub, SQL queries, generators), `rows` turns rows into tasks, `splits` assigns
them to train, validation and test, `loading` stores them, `verdicts` reads them in batches for a task pipeline and stores its
decisions, `embeddings` stores their vectors.
"""

from __future__ import annotations

from rftdata.pipeline.task_verdicts import show_tasks
from rftdata.tasks.loading import list_tasksets, load_taskset, taskset_texts
from rftdata.tasks.rows import read_tasks
from rftdata.tasks.splits import numbers_key, split_of

__all__ = [
    "list_tasksets",
    "load_taskset",
    "numbers_key",
    "read_tasks",
    "show_tasks",
    "split_of",
    "taskset_texts",
]
