"""A store as the benchmark controls it: the program `benchmarks.buffer.pool` in the store's environment."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.buffer.pool import NUM_PRODUCERS
from benchmarks.harness.report import ROOT
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.environment import InstallationError, python_of

BATCH = 256
KINDS: dict[str, dict[str, Any]] = {
    "write_256": {"measure": "write", "batch": 256, "producers": 1},
    "write_64": {"measure": "write", "batch": 64, "producers": 1},
    "write_256_by_4": {"measure": "write", "batch": 256, "producers": NUM_PRODUCERS},
    "write_64_by_4": {"measure": "write", "batch": 64, "producers": NUM_PRODUCERS},
    "end_to_end": {"measure": "end_to_end", "batch": 256, "producers": 1},
    "end_to_end_by_4": {"measure": "end_to_end", "batch": 256, "producers": NUM_PRODUCERS},
}
_START_S, _LIMIT_S = 180.0, 60.0


class StoreProgram:
    """One store, measured by `benchmarks.buffer.pool` in its own environment.

    Attributes:
        error: why measuring stopped; None otherwise.
        figures: values of each measurement, one a round; None where it failed.
        failures: first error of each failed measurement.
    """

    def __init__(self, name: str, peer: Peer, address: dict[str, Any], num: int) -> None:
        self.name, self.peer = name, peer
        self.num = max(512, int(num * peer.share))
        self.error: str | None = None
        self.version: str | None = None
        self.figures: dict[str, list[float | None]] = {}
        self.bytes_per_s: list[float | None] = []
        self.delays: list[float] = []
        self.failures: dict[str, str] = {}
        self._keys = 0
        self._process: subprocess.Popen[str] | None = None
        try:
            python = python_of(peer.requirements) if peer.requirements else Path(sys.executable)
        except InstallationError as error:
            self.error = f"not installed: {error}"
            return
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.buffer.pool", peer.module],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(Path(address["folder"]) / f"{name}.log").open("w"),
        )
        self._log = Path(address["folder"]) / f"{name}.log"
        answer = self._ask(address, _START_S)
        if "result" in answer:
            self.version = answer["result"]["version"]

    def measure(self, kind: str) -> None:
        """Add one value of a measurement."""
        values = self.figures.setdefault(kind, [])
        order = KINDS[kind]
        num = max(self.num, order["producers"] * order["batch"])
        answer = self._order(order, num=num) if self.error is None and kind not in self.failures else {}
        if "error" in answer:
            self.failures[kind] = answer["error"]
        result = answer.get("result")
        values.append(result and result["experiences_per_s"])
        if kind == "write_256":
            self.bytes_per_s.append(result and result["bytes_per_s"])

    def measure_latency(self, num_writes: int) -> None:
        answer = (
            self._order({"measure": "latency", "batch": BATCH}, num=num_writes * BATCH) if self.error is None else {}
        )
        if "error" in answer:
            self.failures["latency"] = answer["error"]
        self.delays = answer.get("result", {}).get("ms", [])

    def warm_up(self) -> None:
        """Let every process connect, import, plan and read pages, before anything is measured."""
        for producers in (1, NUM_PRODUCERS):
            if self.error is None:
                order = {"measure": "end_to_end", "batch": 64, "producers": producers}
                self._order(order, num=producers * 6 * 64, limit_s=_START_S)

    def _order(self, order: dict[str, Any], num: int, limit_s: float = _LIMIT_S) -> dict[str, Any]:
        answer = self._ask({**order, "num": num, "first_key": self._keys, "limit_s": limit_s}, 3 * limit_s)
        self._keys += num
        return answer

    def _ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            timer = threading.Timer(limit_s, self._process.kill)
            timer.start()
            line = self._process.stdout.readline()
            timer.cancel()
        except OSError:
            line = ""
        if not line:
            said = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
            self.error = f"its program ended; its last output: {' | '.join(said[-3:])[-500:]}"
            return {}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
                self._process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
