"""The tiny model of examples/sort_from_scratch, warmed up by the example itself: what most acceptance tests start from."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import rftdata
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, call_rft


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
        call_rft("run", EXAMPLE / "sft.yaml", "--buffer", buffer, "--set", f"model.path={model}", "--plain")
        with rftdata.open(str(buffer)) as opened:
            uri = opened.sql("select uri from rft.checkpoint order by trainer_step desc limit 1")["uri"][0].as_py()
        EmbeddedServer(buffer).stop()
        found.write_text(uri)
    return Warm(Path(found.read_text()))
