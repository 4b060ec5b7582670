"""Processes of GPU benchmarks: each piece of work runs in a process of its own, so that it starts with an empty device."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Processes:
    """Starts every piece of work in a process of its own that has imported what it needs already.

    The processes are forked from a server that has not touched the GPU. Where an import touches it, they are spawned instead.

    Args:
        folder: folder of the description of the device, and of results.
        modules: imported by the server.

    Attributes:
        device: name, CPU threads and number of GPUs.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # `is_available` then leaves the GPU alone
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        self.folder = folder
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rftcore.trainer.learner", *modules])
        self.device = self._describe()

    def run(self, work: Callable[..., None], *arguments: Any, limit_s: float | None = None) -> str | None:
        """Wait for the end of some work; return why it failed, None if it did not."""
        process = self._context.Process(target=work, args=arguments)
        process.start()
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
            return f"killed after {limit_s:.0f} s"
        return None if process.exitcode == 0 else f"exit code {process.exitcode}"

    def _describe(self) -> dict[str, Any]:
        file = self.folder / "device.json"
        if self.run(describe, file):
            self._context = multiprocessing.get_context("spawn")
            if problem := self.run(describe, file):
                raise RuntimeError(f"the device cannot be used: {problem}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def describe(file: Path) -> None:
    """Write what the device is."""
    import torch

    name = "CPU"
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        name = torch.cuda.get_device_name()
    found = {"name": name, "threads": torch.get_num_threads(), "num_gpus": torch.cuda.device_count()}
    file.write_text(json.dumps(found))


def redirect(log: Path) -> None:
    """Append all output of this process and its children to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def read_lines(output: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, none if it does not exist."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def append_line(output: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file."""
    with output.open("a") as file:
        file.write(json.dumps(line) + "\n")
