"""The short version of the storm on Ray: its head and its raylet are killed, and the run continues after each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rftcore.run.gpus import local_gpus

CHECKOUT = Path(__file__).resolve().parents[2]
LIVES = 2


def program(*options: object) -> list[str]:
    return [sys.executable, "-m", "tests.crash.ray_storm", "--lives", str(LIVES), *map(str, options)]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_whose_ray_head_or_raylet_is_killed_reports_it_continues_and_loses_nothing(server_folders: Path) -> None:
    folder = server_folders / "ray_storm"
    folder.mkdir()
    command = program("--seed", os.environ.get("SEED", "20"), "--folder", folder)
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    # How each life ends, what it prints and which processes it leaves is checked by the program itself.
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    pattern = rf"{LIVES} lives on Ray, \d+ kills: 0 lost, 0 trained twice, 0 mislabelled, 0 on old weights"
    assert re.fullmatch(pattern, done.stdout.splitlines()[-1]), done.stdout
    (summary,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert summary["killed"]["gcs_server"] == 1 and summary["killed"]["raylet"] == 1
    looked_at = re.search(r"(\d+) experiences, (\d+) steps in (\d+) attempts, (\d+) times weights", done.stdout)
    assert looked_at is not None and all(int(number) > 0 for number in looked_at.groups()), done.stdout
    assert int(looked_at[3]) == LIVES + 1


@pytest.mark.skipif(bool(local_gpus()), reason="has a GPU")
def test_gpu_1_is_refused_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.crash.ray_storm import main  # with Ray, which nothing else in this process may need

    with pytest.raises(SystemExit, match="2"):
        main(["--gpu"])
    assert "needs a GPU, and nvidia-smi lists none here" in capsys.readouterr().err
    make = subprocess.run(
        ["make", "-n", "crash-test", "GPU=1"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert "tests.crash.ray_storm --gpu" in make.stdout
