"""The workflow and the source `verifiers` where the package is missing; tests/acceptance/test_verifiers.py has it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rftcore.programs.verifiers import check_args, check_task
from rftcore.programs.verifiers_host import VerifiersHost, VerifiersSettings
from rftcore.workflows.task import Task
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError, RftError, TaskSourceError
from rftdata.tasks.rows import read_tasks

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"python": "no/python"}, "interpreter of its virtual environment"),
        ({"python": "."}, "interpreter"),
        ({"python": sys.executable, "sampling": "mine"}, "sampling"),
        ({"python": sys.executable, "environment_args": [1]}, "environment_args"),
        ({"python": sys.executable, "start_s": 0}, "start_s"),
    ],
)
def test_settings_with_which_no_episode_could_run_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_args(HERE, environment="sums", **args)


def test_a_task_of_another_source_is_refused() -> None:
    with pytest.raises(RftError, match=r"has no data of verifiers.*verifiers:ENVIRONMENT"):
        check_task(Task(1, "sums", "one", "1 + 1?", "2"))
    check_task(Task(1, "sums", "one", "1 + 1?", None, {"verifiers": {"prompt": "1 + 1?"}}))


def test_an_interpreter_without_verifiers_is_an_error_of_the_configuration() -> None:
    settings = VerifiersSettings(Path(sys.executable), "sums", {}, HERE, 60.0)
    with pytest.raises(ConfigError, match=r"(?s)does not load.*No module named 'verifiers'.*virtual environment"):
        asyncio.run(VerifiersHost.start(settings))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "python, the interpreter"),
        ({"python": sys.executable, "size": 1}, "args of the taskset"),
        ({"python": "no/python"}, "interpreter of its virtual environment"),
        ({"python": sys.executable}, "No module named 'verifiers'"),
    ],
)
def test_tasks_that_cannot_be_read_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(TaskSourceError, match=text):
        list(read_tasks(TasksetConfig(name="sums", source="verifiers:sums", args=args), HERE))
