"""Sandboxes for tests, and the reason why this machine offers none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.local import LocalSandbox
from rftcore.sandbox.tiers import strongest_level
from rftdata.errors import ConfigError


def strongest_level_here() -> str:
    """Return the level of the strongest tier; skip the test on a machine without any."""
    try:
        return strongest_level(Interpreter.of(None), unsafe_local=False)
    except ConfigError as error:
        pytest.skip(f"no tier of sandboxes: {error}")


@contextmanager
def sandbox_here(config: SandboxConfig) -> Iterator[LocalSandbox]:
    """Open a sandbox of the strongest tier; skip the test on a machine without any."""
    strongest_level_here()
    sandbox = LocalSandbox(config)
    try:
        yield sandbox
    finally:
        sandbox.close()
