"""The kinds of sandboxes by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.program import Sandbox
from rftdata.plugins import Registry

SANDBOXES = Registry[Callable[[SandboxConfig], Sandbox]](
    "sandbox",
    {
        "local": "rftcore.sandbox.local:LocalSandbox",
    },
)


def open_sandbox(config: SandboxConfig, base_dir: Path | None = None) -> Sandbox:
    """Return the sandbox of a configuration.

    Raises:
        PluginError: its type is unknown or does not load.
        ConfigError: this machine cannot confine programs so.
    """
    return SANDBOXES.load(config.type, base_dir)(config)
