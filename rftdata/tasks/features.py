"""Numbers among the features of stored tasks, which selectors choose by."""

from __future__ import annotations

from rftdata.postgres.database import Database


def all_have_number(database: Database, taskset: str, key: str) -> bool:
    """Whether a set has tasks to select, and each of them this feature as a number."""
    numbers = database.fetch("task_numbers", taskset=taskset, key=key)[0]["numbers"]
    return bool(numbers) and all(number is not None for number in numbers)


def set_by_hand(database: Database, taskset: str, key: str) -> dict[str, bool]:
    """Keys of the tasks whose feature a person set, and whether it is a number."""
    found: dict[str, bool] = database.fetch("features_by_hand", taskset=taskset, key=key)[0]["are_numbers"]
    return found
