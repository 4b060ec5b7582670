"""The Python interpreter of the programs in a sandbox, and the folders that it needs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from rftdata.errors import ConfigError

_ASK = "import sys, json; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys._base_executable]))"
_ASK_S = 20.0


@dataclass(frozen=True)
class Interpreter:
    """An interpreter.

    Attributes:
        path: of its program.
        folders: that programs must be able to read.
    """

    path: str
    folders: tuple[str, ...]

    @classmethod
    def of(cls, path: str | None) -> Interpreter:
        """Return an interpreter; None: that of this process, without the packages of its virtual environment.

        Raises:
            ConfigError: it does not run.
        """
        if path is None:
            own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
            return cls(own, _without_system(sys.base_prefix, os.path.realpath(sys.base_prefix)))
        return _asked(path)


@functools.lru_cache(maxsize=16)
def _asked(path: str) -> Interpreter:
    expanded = os.path.abspath(os.path.expanduser(path))
    try:
        text = subprocess.run([expanded, "-I", "-c", _ASK], capture_output=True, timeout=_ASK_S, check=True).stdout
        executable, prefix, base_prefix, base = json.loads(text)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"the interpreter of the sandbox does not run: {error}",
            value=path,
            todo="correct sandbox.python, or remove it",
        ) from error
    folders = (prefix, base_prefix, os.path.realpath(base_prefix), os.path.dirname(os.path.realpath(base)))
    return Interpreter(executable, _without_system(*folders))


def _without_system(*folders: str) -> tuple[str, ...]:
    """Return folders once each, without those that every sandbox shows."""
    return tuple(dict.fromkeys(folder for folder in folders if folder != "/usr" and not folder.startswith("/usr/")))
