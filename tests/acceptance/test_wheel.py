"""The wheel alone, in an empty environment outside the checkout, makes a buffer, writes to it and reads it back."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from pathlib import Path
import rftdata

checkout, folder = Path(sys.argv[1]), sys.argv[2]
assert checkout not in Path(rftdata.__file__).resolve().parents, rftdata.__file__
buffer = rftdata.open(folder)
try:
    run = buffer.create_run(name="wheel", config={}, seed=0, steps=1, pipeline_version="")
    rollouts = [
        rftdata.Rollout(
            index=index,
            reward=float(index),
            sequences=[
                rftdata.Sequence(
                    prompt="1 + 1 =", response=str(index), token_ids=[5, 6, 7, 8 + index], num_prompt_tokens=3,
                    finish_reason="stop", reward=float(index), behavior_logprobs=[-0.5],
                )
            ],
        )
        for index in range(2)
    ]
    group = rftdata.Group(rollouts=rollouts, taskset="sums", task_key="1+1", payload={"question": "1 + 1 ="})
    with buffer.writer(run) as writer:
        [group_id] = writer.insert(group)
    found = buffer.sql(
        "SELECT experience_id, response, reward FROM rft.v_experience WHERE group_id = %(group_id)s ORDER BY rollout_index",
        {"group_id": group_id},
    ).to_pylist()
    assert [(row["response"], row["reward"]) for row in found] == [("0", 0.0), ("1", 1.0)], found
    arrays = buffer.read_arrays([row["experience_id"] for row in found], ["token_ids", "behavior_logprobs"])
    assert arrays["token_ids"].to_pylist() == [[5, 6, 7, 8], [5, 6, 7, 9]], arrays
finally:
    buffer.close()
    buffer.server.stop()
heavy = {"torch", "ray", "vllm", "transformers"} & sys.modules.keys()
assert not heavy, heavy
print("read back", len(found), "experiences")
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The default of `build`: a source distribution first, and the wheel from that, so both are known to be complete.
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, CHECKOUT, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_carries_the_sql_and_nothing_from_beside_the_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"rftdata", "operators", "rftcore", "rftdata-0.1.0.dist-info"}
    carried = {name.removeprefix("rftdata/") for name in names if name.startswith("rftdata/sql/")}
    sources = (path for path in (CHECKOUT / "sql").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert carried == {path.relative_to(CHECKOUT).as_posix() for path in sources}


@pytest.mark.slow
def test_the_wheel_alone_makes_a_buffer_writes_and_reads_it_back(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    constraints = CHECKOUT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel, cwd=tmp_path)
    script = tmp_path / "first_steps.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # -I: neither PYTHONPATH nor the current folder can lend the checkout's packages.
    output = run(python, "-I", "-W", "error", script, CHECKOUT, tmp_path / "buffer", cwd=tmp_path)
    assert output.strip() == "read back 2 experiences"
    assert "sql" in run(environment / "bin" / "rft", "--help", cwd=tmp_path)
