"""Small complete projects that `rft init` writes: a configuration that runs as it is, its tasks, its reward, and a page on what to change.

A folder beside this file holds the files of one kind; tasks and the schema for editors are generated. All learn sums of two numbers, so that what differs
between the kinds is the kind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftcore.installation.pages import config_schema
from rftdata.errors import ConfigError
from rftdata.files.durable import draft_folder

KINDS = {
    "grpo": "reinforcement learning with a reward of your own",
    "sft": "imitate chats",
    "dpo": "preference pairs from the rewards of a run, and DPO on them",
    "workflow": "a tool that the model may call, in a loop",
    "environment": "an environment of your own, in which the model acts",
    "stages": "imitate first, then reinforce, in one file",
}
_LARGEST = 20
_SCHEMA = "config.schema.json"


def write_project(kind: str, folder: Path) -> list[Path]:
    """Write a project into a new or empty folder; return its files. A new folder appears with all of them.

    Raises:
        ConfigError: the folder contains something, or cannot be written.
        ConflictError: another process is writing a project there.
    """
    folder = folder.resolve()
    try:
        _refuse_filled(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder) as draft:
            _refuse_filled(folder)  # another process may have finished a project here meanwhile
            for name, text in _files(kind).items():
                (draft / name).write_text(text, encoding="utf-8")
            if folder.exists():  # keep the folder, because a shell may be in it
                for file in draft.iterdir():
                    file.rename(folder / file.name)
            else:
                draft.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"the project cannot be written: {error.strerror}", value=str(folder), todo="name another folder"
        ) from error
    return sorted(folder.iterdir())


def _refuse_filled(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "the folder for the project is not empty", value=str(folder), todo="name a new one; nothing was written"
        )


def _files(kind: str) -> dict[str, str]:
    kept = {
        path.name: path.read_text(encoding="utf-8")
        for path in (Path(__file__).parent / kind).iterdir()
        if path.is_file()
    }
    rows: dict[str, Callable[[], str]] = {"tasks.jsonl": _tasks, "chats.jsonl": _chats}
    read = "".join(text for name, text in kept.items() if name.endswith(".yaml"))
    made = {name: make() for name, make in rows.items() if name in read}
    return {**kept, **made, _SCHEMA: config_schema(), ".gitignore": "buffer/\n"}


def _tasks() -> str:
    return _lines({"question": f"{a} + {b} =", "answer": str(a + b)} for a, b in _pairs())


def _chats() -> str:
    return _lines(
        {
            "messages": [
                {"role": "user", "content": f"{a} + {b} ="},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            ]
        }
        for a, b in _pairs()
    )


def _pairs() -> list[tuple[int, int]]:
    """Return all pairs of small numbers in a fixed order; the model of the configurations adds them correctly at times."""
    every = [(a, b) for a in range(1, _LARGEST + 1) for b in range(1, _LARGEST + 1)]
    random.Random(1).shuffle(every)
    return every


def _lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
