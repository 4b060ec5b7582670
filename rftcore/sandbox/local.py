"""`LocalSandbox`: programs confined by the kernel of this machine, at its strongest tier."""

from __future__ import annotations

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.host_process import HostProcess, RunningLocal, request_of
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.program import Program
from rftcore.sandbox.tiers import strongest_level, tier_name


class LocalSandbox:
    """Programs in namespaces of this machine, or with Landlock.

    Args:
        config: the section `sandbox`.

    Raises:
        ConfigError: this machine offers no tier, and the configuration does not say `unsafe_local`.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._interpreter = Interpreter.of(config.python)
        self._level = strongest_level(self._interpreter, unsafe_local=config.unsafe_local)
        self._host = HostProcess()

    @property
    def tier(self) -> str:
        """The name of the tier."""
        return tier_name(self._level)

    def start(self, program: Program) -> RunningLocal:
        """Start a program; see `Sandbox.start`."""
        return self._host.start(request_of(program.checked(), self._config, self._interpreter, self._level), program)

    def close(self) -> None:
        """End all programs."""
        self._host.close()
