"""Program that prints the tasks of an environment of the package verifiers, a line of JSON each. It runs with the interpreter of that package.

A script of its own, so that it needs nothing of this package: `python -P verifiers_program.py`, with its settings as JSON on the standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Print the tasks. A line is a list: how the task is named, and its data."""
    import verifiers.v1 as vf  # type: ignore[import-not-found, unused-ignore]

    taskset = settings["args"].get("taskset") or {}
    config_class = vf.taskset_config_type(settings["environment"])
    config = config_class.model_validate({**taskset, "id": settings["environment"]})
    for task in vf.load_taskset(config):
        sys.stdout.write(json.dumps([task.key, task.data.prompt_text, task.data.model_dump(mode="json")]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.load(sys.stdin))
