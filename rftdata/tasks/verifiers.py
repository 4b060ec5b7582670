"""The source `verifiers:ENVIRONMENT`: tasks of an environment of the package verifiers, which has a virtual environment of its own.

The tasks are read by a program that runs with the interpreter of that virtual environment (`args.python`). Each carries verifiers' own data in the column
`verifiers`, from which the workflow `verifiers` makes its episode.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError, TaskSourceError

PREFIX = "verifiers:"
DATA_COLUMN = "verifiers"
_PROGRAM = Path(__file__).with_name("verifiers_program.py")
_NOT_THEIRS = ("PYTHONHOME", "__PYVENV_LAUNCHER__")


def is_verifiers(source: str) -> bool:
    """Return whether a source is of this kind."""
    return source.startswith(PREFIX)


def interpreter(python: object, base_dir: Path) -> Path:
    """Return the interpreter of verifiers' virtual environment.

    Raises:
        ConfigError: it does not exist.
    """
    path = base_dir / str(python)
    if not isinstance(python, str) or not os.access(path, os.X_OK) or path.is_dir():
        raise ConfigError(
            "verifiers needs the interpreter of its virtual environment",
            value=python,
            allowed="a path such as verifiers-env/bin/python, relative to the configuration file",
            todo="python3 -m venv verifiers-env && verifiers-env/bin/pip install verifiers uv",
        )
    return path.absolute()  # not resolved: a virtual environment is found by the path of its interpreter


def program_environment(python: Path, folder: Path) -> dict[str, str]:
    """Return the variables for a program of another virtual environment, whose commands come first. It imports modules of the folder, and none of ours."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS}
    path = f"{python.parent}:{kept.get('PATH', os.defpath)}"
    return {**kept, "VIRTUAL_ENV": str(python.parent.parent), "PATH": path, "PYTHONPATH": str(folder)}


def rows(config: TasksetConfig, base_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an environment.

    Raises:
        TaskSourceError: they cannot be read.
    """
    unknown = sorted(set(config.args) - {"python", "environment_args"})
    if unknown or "python" not in config.args:
        raise TaskSourceError(
            f"args of the taskset {config.name!r} are not valid",
            value=unknown[0] if unknown else config.args,
            allowed="python, the interpreter of verifiers' virtual environment; environment_args, as in workflow_args",
        )
    try:
        python = interpreter(config.args["python"], base_dir)
    except ConfigError as error:
        raise TaskSourceError(f"the taskset {config.name!r} cannot be read: {error}") from error
    settings = {
        "environment": config.source.removeprefix(PREFIX),
        "args": config.args.get("environment_args") or {},
    }
    with tempfile.TemporaryFile() as errors:
        program = subprocess.Popen(
            [str(python), "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=program_environment(python, base_dir.absolute()),
            cwd=base_dir,
        )
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            with program.stdin:
                program.stdin.write(json.dumps(settings).encode())
            for line in program.stdout:
                key, question, data = json.loads(line)
                yield {"key": key, "question": question, DATA_COLUMN: data}
            if program.wait() != 0:
                errors.seek(0)
                last = errors.read()[-2000:].decode(errors="replace").strip()
                raise TaskSourceError(
                    f"the tasks of {config.source!r} cannot be read:{os.linesep}{last}",
                    todo=f"correct the taskset {config.name!r}; {python} must have verifiers 0.4 and the environment",
                )
        finally:  # a limit may end the reading
            program.kill()
            program.wait()
            program.stdout.close()
