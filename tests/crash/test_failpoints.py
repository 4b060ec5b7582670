"""A crash at every named place: what was acknowledged is there, nothing is trained twice, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdata.failpoints import FAILPOINTS, arm
from tests.crash.crew import ROLES, Crew
from tests.crash.examine import examine
from tests.crash.storm import Watch, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_ROLE = {
    "writer": "explorer-0",
    "planner": "explorer-0",
    "explorer": "explorer-0",
    "pipeline": "pipeline",
    "trainer": "trainer",
}


@pytest.fixture
def crew(server_folders: Path) -> Iterator[Crew]:
    folder = server_folders / "failpoints"
    folder.mkdir()
    crew = Crew(folder, make_model(folder))
    yield crew
    crew.close()


def test_a_crash_at_every_failpoint(crew: Crew) -> None:
    """Two passings of each, since the first may be special: of a new attempt, of an empty buffer."""
    for role in ROLES:
        # One explorer, so that the work cannot pass by the one that is to die.
        if role != "explorer-1":
            crew.start(role)
    watch = Watch(crew)
    for name in FAILPOINTS:
        for passing in (1, 2):
            role = _ROLE[name.partition(".")[0]]
            if role in crew.lives:
                crew.kill(role)
            life = crew.start(role, f"{name}:{passing}")
            if name == "trainer.started" and passing == 2:
                crew.kill(role)  # a life has one start
            else:
                assert crew.wait_for_end(life, 30) == "killed", name
            crew.start(role)
            watch.wait_for_steps(1)
    watch.wait_for_steps(3)
    crew.stop()
    findings = examine(crew.folder)
    assert findings.nothing, findings
    assert findings.steps >= 5 and findings.attempts >= 2 * sum(name.startswith("trainer.") for name in FAILPOINTS)


def test_an_unknown_failpoint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no failpoint is called 'writer\.nowhere'; there are writer\.appended"):
        arm("writer.nowhere")
