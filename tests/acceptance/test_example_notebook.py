"""examples/notebook runs from its first cell to its last, on a new buffer and on a given one, without torch or a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rows
from tests.support.waiting import PATIENCE_S

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "read_a_buffer.ipynb"
CHECK = "import sys\nassert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"


def cells() -> list[dict[str, object]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run(folder: Path, **environment: str) -> str:
    """Run the code cells one after the other in a process of their own, as a kernel would; what they print."""
    program = "\n\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")
    (folder / "cells.py").write_text(f"{program}\n\n{CHECK}\n", encoding="utf-8")
    known = {key: value for key, value in os.environ.items() if key != "RFT_BUFFER"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "cells.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**known, "MPLBACKEND": "Agg", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(server_folders: Path) -> Iterator[Path]:
    folder = server_folders / "notebook"
    folder.mkdir()
    yield folder
    for buffer in folder.glob("*-buffer"):
        EmbeddedServer(buffer).stop()


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What the notebook printed in the folder, where it left its buffer and its plot."""
    return run(folder)


def test_the_notebook_writes_a_buffer_and_continues_to_a_training_batch(folder: Path, printed: str) -> None:
    assert "experiences and tokens: (64, 39) trained on: " in printed
    buffer = folder / "notebook-buffer"
    labels = rows(buffer, "select new_value, author, reason from rft.label order by label_id")
    given = [label for label in labels if label["reason"] == "a full stop is fine"]
    assert len(given) > 20 and {label["new_value"] for label in given} == {1.0}
    assert f"{len(given)} rewards are as they were before" in printed and len(labels) == 2 * len(given)
    assert rows(buffer, "select count(*) as n from rft.experience where reward <> reward_sampled") == [{"n": 0}]
    # Labelled rewards were in the selection's hash, and the batch was released.
    assert rows(buffer, "select status, source_kind, label_cut > 0 as pinned from rft.run where name = 'notebook'") == [
        {"status": "finished", "source_kind": "experience", "pinned": True}
    ]
    assert rows(buffer, "select count(*) as n from rft.v_consumption") == [{"n": 0}]


def test_the_plot_shows_rewards_and_how_sure_the_policy_was(folder: Path, printed: str) -> None:
    import matplotlib.image

    picture = matplotlib.image.imread(folder / "rewards.png")[:, :, :3]
    middle = picture.shape[1] // 2
    for half in (picture[:, :middle], picture[:, middle:]):
        blue = (half[:, :, 2] > half[:, :, 0] + 0.2).mean()
        assert 0.001 < blue < 0.5, "the half of the plot holds no curve or bars"


def test_the_notebook_reads_a_buffer_that_is_named_and_leaves_its_rewards(folder: Path, printed: str) -> None:
    before = rows(folder / "notebook-buffer", "select experience_id, reward from rft.experience order by 1")
    (other := folder / "other").mkdir()
    assert "[{'experiences': 512}]" in run(other, RFT_BUFFER=str(folder / "notebook-buffer"))
    assert not (other / "notebook-buffer").exists()
    assert rows(folder / "notebook-buffer", "select experience_id, reward from rft.experience order by 1") == before


def test_the_notebook_is_stored_without_outputs() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells() if "outputs" in cell)
    assert len({cell["id"] for cell in cells()}) == len(cells()) and NOTEBOOK.stat().st_size < 20_000
