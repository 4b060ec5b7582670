"""The section `sandbox` of rewards, tools and environments that run a model's code."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rftcore.sandbox.request import Limits
from rftdata.config import Section

_MIB = 1 << 20


class SandboxConfig(Section):
    """How a model's code is confined, and its limits."""

    type: str = Field(
        "local",
        description="local (namespaces or Landlock of this machine), or the name or path of your own.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Settings of a sandbox that is not local.")
    unsafe_local: bool = Field(
        False,
        description="Run the code unconfined where no tier is possible. It can then read, change and send what the run can.",
    )
    python: str | None = Field(
        None,
        description="Interpreter for the code, such as that of a virtual environment with its packages; by default this run's, without packages.",
    )
    readable: list[str] = Field(
        default_factory=list, description="Further paths of this machine that the code may read."
    )
    wall_s: float = Field(10.0, gt=0, description="Seconds after which a program is killed.")
    cpu_s: int = Field(10, ge=1, description="Processor seconds of each process.")
    memory_bytes: int = Field(512 * _MIB, ge=32 * _MIB, description="Memory of all processes of a program together.")
    processes: int = Field(32, ge=1, le=4096, description="Processes and threads that a program may have at a time.")
    file_bytes: int = Field(64 * _MIB, ge=4096, description="Largest file.")
    disk_bytes: int = Field(
        128 * _MIB, ge=65536, description="Size of all files together. They are in memory, where there are namespaces."
    )
    output_bytes: int = Field(_MIB, ge=1024, description="Standard output and standard error together.")

    @property
    def limits(self) -> Limits:
        """The limits of a program."""
        names = ("wall_s", "cpu_s", "memory_bytes", "processes", "file_bytes", "disk_bytes", "output_bytes")
        return Limits(**{name: getattr(self, name) for name in names})
