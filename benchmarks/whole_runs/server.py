"""`vllm serve` beside TRL's trainer, on the same device."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_STOP_S = 20.0


class ServerFailedError(RuntimeError):
    """The server did not start."""


@contextlib.contextmanager
def vllm_server(case: Mapping[str, Any], log: Path, environment: Mapping[str, str], limit_s: float) -> Iterator[str]:
    """Start the server that TRL's documentation describes; yield its address once it answers.

    Raises:
        ServerFailedError: it ended, or did not answer within the limit.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    engine = case["engine_args"]
    options = {
        "--model": case["model"],
        "--host": "127.0.0.1",
        "--port": port,
        "--weight-transfer-config": '{"backend": "nccl"}',
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
        "--max-model-len": engine.get("context_length"),
        "--gpu-memory-utilization": engine.get("gpu_memory_utilization", 0.4),
        "--max-num-seqs": case["batch_groups"] * case["group_size"],
    }
    arguments = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(process, f"{address}/health", limit_s)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], address: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(address, timeout=2.0):
            return
        if time.monotonic() > deadline:
            raise ServerFailedError(f"vllm serve did not answer within {limit_s:.0f} s")
        time.sleep(0.5)
    raise ServerFailedError(f"vllm serve ended with {process.returncode}")
