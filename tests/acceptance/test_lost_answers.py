"""A whole run over a line to the database that loses the answer of every kind of transaction once: every role rides it out, and nothing is done twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import rftdata
from rftdata.config import BufferConfig
from rftdata.maintenance.states import wrong_states
from rftdata.maintenance.verification import verify
from tests.support.lossy_line import LossyLine, Statements
from tests.support.small_runs import STEPS, settings, start
from tests.support.waiting import printed_by
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# What each role does when it begins, so that it must be lost for each.
_OF_EACH = ("INSERT INTO rft.worker", "rft.schema_version")


class OnceEach:
    """Chooses the first transaction of each kind, that is of the same statements, from when roles begin: a command that finds no database says so.

    Of what each role does when it begins, every other one.
    """

    def __init__(self) -> None:
        self.kinds = Counter[Statements]()
        self._has_begun = False
        self._lock = threading.Lock()

    def __call__(self, statements: Statements) -> bool:
        kind = tuple(dict.fromkeys(statements))
        with self._lock:
            self._has_begun |= any("INSERT INTO rft.worker" in statement for statement in statements)
            if not self._has_begun:
                return False
            self.kinds[kind] += 1
            is_of_each = any(text in statement for statement in kind for text in _OF_EACH)
            return self.kinds[kind] == 1 or (is_of_each and self.kinds[kind] % 2 == 1)


def test_a_run_rides_out_the_loss_of_any_answer(
    databases: Callable[[str], AbstractContextManager[str]], warm: Warm, tmp_path: Path
) -> None:
    once, segments = OnceEach(), tmp_path / "segments"
    options = settings(warm, f"buffer.segments={segments}", "sync={method: nccl}", "pipelines.workers=2")
    with databases("lossy") as uri:
        with LossyLine(uri) as line, line.losing(once):
            process = start("run", "--plain", "--buffer", line.uri, *options)
            output = printed_by(process)
        assert process.returncode == 0, output
        assert "started again" not in output, output
        assert line.num_lost > len(once.kinds) > 80
        with rftdata.open(BufferConfig(uri=uri, segments=str(segments))) as buffer:
            assert [*verify(buffer), *wrong_states(buffer.database)] == []
            steps = buffer.sql("select trainer_step from rft.train_step order by 1")["trainer_step"].to_pylist()
            assert steps == [*range(1, STEPS + 1)]
            roles = buffer.sql("select role::text as role from rft.worker order by 1")["role"].to_pylist()
            assert roles == ["explorer", "pipeline", "pipeline", "supervisor", "trainer"], "each registered once"
