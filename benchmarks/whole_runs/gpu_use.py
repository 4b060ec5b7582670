"""The use of a GPU over time, from `nvidia-smi`."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from types import TracebackType
from typing import Any

_EVERY_MS = 200
_FREE_MIB = 2048.0


def await_free(index: str, limit_s: float = 30.0) -> None:
    """Wait until the processes of an earlier run have left a GPU, at most for a limit: others may use it, too."""
    program, deadline = shutil.which("nvidia-smi"), time.monotonic() + limit_s
    while program is not None and time.monotonic() < deadline:
        query = [program, "-i", index, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if not used.isdigit() or float(used) < _FREE_MIB:
            return
        time.sleep(0.5)


class GpuUse:
    """Samples one GPU while its block runs; without a GPU it has no samples.

    Args:
        index: the GPU's number or UUID, as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, index: str) -> None:
        self._index = index
        self._samples: list[tuple[float, float, float]] = []  # time, per cent, MiB
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuUse:
        program = shutil.which("nvidia-smi")
        if program is not None:
            query = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [program, "-i", self._index, *query, "-lms", str(_EVERY_MS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._thread = threading.Thread(target=self._read, args=(self._process,), name="GPU use", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Return the mean share of the time in which a kernel ran, and the greatest memory in use, between two times of `time.time`."""
        inside = [sample for sample in self._samples if start <= sample[0] <= end]
        if not inside:
            return {"gpu_busy": None, "peak_gib": None}
        return {
            "gpu_busy": round(statistics.fmean(percent for _, percent, _ in inside) / 100, 3),
            "peak_gib": round(max(mib for *_, mib in inside) / 1024, 2),
        }

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            fields = [field.strip() for field in line.split(",")]
            try:
                self._samples.append((time.time(), float(fields[0]), float(fields[1])))
            except (ValueError, IndexError):  # a GPU without these counters answers with a text
                continue
