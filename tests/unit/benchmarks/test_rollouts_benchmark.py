"""`rft bench rollouts`: an explorer and `LLM.generate` sample the same numbers of tokens for the same prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]


# Two engines, with a process more for one of them.
@pytest.mark.long
@pytest.mark.timeout(900)
def test_both_programs_sample_all_answers(tmp_path: Path) -> None:
    options = "--shape small --concurrent 8 --tokens 4,8 --work-ms 0,1 --waves 2 --prompt-characters 10 --set kv_cache_gib=0.25"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "rollouts", "--folder", str(tmp_path), *options.split()],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    names = [(row["system"], row["tokens"], row["work_ms"], row.get("detokenize")) for row in rows]
    assert names == [
        *(("LLM.generate", tokens, 0, texts) for tokens in (4, 8) for texts in (False, True)),
        ("explorer", 4, 0, None),
        ("explorer", 4, 1, None),
        ("explorer", 8, 0, None),
    ]
    for row in rows:
        assert 0.8 * 16 * row["tokens"] <= row["seconds"] * row["tokens_per_s"] <= 1.01 * 16 * row["tokens"] + 1
    assert all(row["ratio"] > 0 for row in rows if row["system"] == "explorer")
