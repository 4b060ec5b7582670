"""The process of a Python function that is an agent: `python -m rftcore.programs.function NAME FOLDER`, with the task as JSON on its standard input.

The function is called with the task, a dict. What it returns is its reward: a number, `{"reward": …, "parts": {…}}`, or None.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftcore.failures import describe, user_stack
from rftdata.plugins import Registry

AGENT_FUNCTIONS = Registry[Callable[..., Any]]("agent", {})


def main(name: str, folder: str) -> int:
    """Call the function and write its result, or its error with the user's stack, to the result file; return the exit code."""
    task = json.load(sys.stdin)
    try:
        found = AGENT_FUNCTIONS.load(name, Path(folder))(task)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        result = found if found is None or isinstance(found, dict) else {"reward": float(found)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: errors of a user's code are data
        result = {"error": describe(error), "stack": user_stack(error)}
    Path(os.environ["RFT_RESULT"]).write_text(json.dumps(result) if result is not None else "")
    return 0


async def _awaited(found: Any) -> Any:
    return await found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
