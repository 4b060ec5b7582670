"""A run whose engine samples from other weights than those it was sent stops with the reason, and is never finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rows
from tests.support.small_runs import settings, start
from tests.support.waiting import printed_by
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_ENGINES = Path(__file__).with_name("wrong_engines.py")
_CLOSE = ["sync.offset=1", "sync.max_logprob_diff=0.02"]


@pytest.fixture
def buffer(server_folders: Path) -> Iterator[Path]:
    buffer = server_folders / "wrong" / "buffer"
    yield buffer
    EmbeddedServer(buffer).stop()


@pytest.mark.parametrize(
    ("engine", "more", "reason"),
    [
        (
            "ChangesAMatrix",
            ["sync.check_weights=true"],
            "are not those of its file: model.layers.0.mlp.down_proj.weight differ",
        ),
        (
            "ChangesAMatrix",
            ["explorer.max_refill=4"],
            "whether the engines sample from the trainer's weights is unknown: all",
        ),
        (
            "ChangesItALittle",
            _CLOSE,
            # In a step, or at the end if none of its answers was rewarded.
            "sample from the trainer's weights",
        ),
    ],
    ids=["compared with the file", "no batch is left", "compared by log-probabilities, one step off"],
)
def test_a_wrong_engine_stops_the_run(engine: str, more: list[str], reason: str, buffer: Path, warm: Warm) -> None:
    more = ["steps=8", "eval.every=8", f"explorer.engine={_ENGINES}:{engine}", *more]
    code, output = run(buffer, warm, *more)
    assert code != 0, output
    assert reason in " ".join(output.split()), output
    assert "Traceback" not in output, output
    assert newest_status(buffer) == "failed"


def test_the_right_engine_stays_within_the_limit_that_a_wrong_one_exceeds(buffer: Path, warm: Warm) -> None:
    code, output = run(buffer, warm, *_CLOSE)
    assert code == 0, output
    assert newest_status(buffer) == "finished"


def run(buffer: Path, warm: Warm, *more: str) -> tuple[int, str]:
    process = start("run", "--plain", "--buffer", buffer, *settings(warm, "sync.method=nccl", *more))
    output = printed_by(process)
    return process.returncode, output


def newest_status(buffer: Path) -> str:
    return str(rows(buffer, "select status::text as status from rft.run order by run_id desc limit 1")[0]["status"])
