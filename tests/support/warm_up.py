"""The tiny model of examples/sort_from_scratch, warmed up by the example itself: what most acceptance tests start from.

In half of the example's steps: after 120 the loss falls no further, and every process of a session waits for the warm-up at first.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import rftdata
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, call_rft

_STEPS = 150


@dataclass(frozen=True)
class Warm:
    """The checkpoint that the warm-up ended with."""

    model: Path


def warm_up(folder: Path) -> Warm:
    """Supervised fine-tuning of a random model of 0.75 million parameters; done once, whichever process asks first."""
    found = folder / "checkpoint"
    if not found.exists():
        model, buffer = folder / "model", folder / "buffer"
        subprocess.run([sys.executable, EXAMPLE / "make_model.py", model], check=True, capture_output=True)
        settings = (f"model.path={model}", f"steps={_STEPS}", f"trainer.checkpoint_every={_STEPS}")
        options = [part for setting in settings for part in ("--set", setting)]
        call_rft("run", EXAMPLE / "sft.yaml", "--buffer", buffer, "--plain", *options)
        with rftdata.open(str(buffer)) as opened:
            uri = opened.sql("select uri from rft.checkpoint order by trainer_step desc limit 1")["uri"][0].as_py()
        EmbeddedServer(buffer).stop()
        found.write_text(uri)
    return Warm(Path(found.read_text()))
