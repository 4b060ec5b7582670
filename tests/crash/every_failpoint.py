"""A crash at every failpoint, one after the other, in one run: python -m tests.crash.every_failpoint FOLDER

A program of its own and not a test: what forks must have computed nothing, and a test's process has.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rftdata.failpoints import FAILPOINTS
from tests.crash.crew import ROLES, Crew, RoleBrokeError
from tests.crash.examine import examine
from tests.crash.storm import Watch, make_model

_ROLE = {
    "writer": "explorer-0",
    "planner": "explorer-0",
    "explorer": "explorer-0",
    "pipeline": "pipeline",
    "trainer": "trainer",
}
# Those of archives are in tests/store/maintenance/test_archive.py: no role passes them.
OF_ROLES = [name for name in FAILPOINTS if name.partition(".")[0] in _ROLE]


def crash_at_each(crew: Crew) -> None:
    """Two passings of each failpoint, since the first may be special: of a new attempt, of an empty buffer.

    Raises:
        RoleBrokeError: a role did not end at its failpoint, or the run did not continue.
    """
    for role in ROLES:
        # One explorer, so that no other explorer does the work of the one that is to be killed.
        if role != "explorer-1":
            crew.start(role)
    watch = Watch(crew)
    for name in OF_ROLES:
        # A life of a trainer has one start.
        for passing in (1,) if name == "trainer.started" else (1, 2):
            role = _ROLE[name.partition(".")[0]]
            if role in crew.lives:
                crew.kill(role)
            ended = crew.wait_for_end(crew.start(role, f"{name}:{passing}"))
            if ended != "killed":
                raise RoleBrokeError(f"{name}:{passing}: the {role} {ended}")
            crew.start(role)
            watch.wait_for_steps(1)
    watch.wait_for_steps(3)
    crew.stop()


def main() -> int:
    folder = Path(sys.argv[1])
    # In turns, so that the failpoints of these are passed, and the others in between.
    crew = Crew(folder, make_model(folder), overrides=["explorer.sleep=true"])
    try:
        crash_at_each(crew)
        findings = examine(folder)
    finally:
        crew.close()
    print(findings)
    print(f"{len(OF_ROLES)} failpoints, {findings.attempts} attempts, {findings.steps} steps")
    return 0 if findings.nothing and findings.steps and findings.experiences and findings.transfers else 1


if __name__ == "__main__":
    sys.exit(main())
