"""Monitors show elsewhere what the buffer holds anyway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftcore.monitor import MONITORS
from rftdata.errors import PluginError

OWN = """
from rftcore.monitor import Monitor

class Lines(Monitor):
    def __init__(self, run_name, folder):
        self.file = open(folder / f"{run_name}.txt", "w")

    def log(self, step, metrics):
        print(step, metrics, file=self.file)

    def close(self):
        self.file.close()
"""


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    monitor = MONITORS.load("tensorboard")("sums", tmp_path)
    for step in (1, 2):
        monitor.log(step, {"loss": 1 / step, "kl": float("nan")})
    monitor.close()
    # In a process of its own: TensorBoard's reader warns about its own dependencies.
    program = (
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E;"
        f" e = E({str(tmp_path / 'tensorboard' / 'sums')!r}).Reload();"
        " print(e.Tags()['tensors'], [t.step for t in e.Tensors('loss')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['loss'] [1, 2]\n"


def test_your_own_monitor_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monitor = MONITORS.load("./mine.py:Lines", tmp_path)("sums", tmp_path)
    monitor.log(3, {"loss": 0.5})
    monitor.close()
    assert (tmp_path / "sums.txt").read_text() == "3 {'loss': 0.5}\n"


def test_an_unknown_monitor_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="did you mean 'tensorboard'"):
        MONITORS.load("tensorbord")
