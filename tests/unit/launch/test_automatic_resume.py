"""`rft run --keep-running` resumes after ends that the user did not ask for; other ends are final."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from rftcore.launch.automatic_resume import keep_running

# In place of `rft run`: it stores a run and ends with the next of the given codes; a negative one is the signal that kills it.
LIFE = """
import os, sys
from pathlib import Path
lives, codes = Path(sys.argv[1]), [int(code) for code in sys.argv[2].split(",")]
number = len(lives.read_text().split()) if lives.exists() else 0
with lives.open("a") as file:
    file.write(sys.argv[3] + "\\n")
code = codes[number]
if sys.argv[3] != "unstored":
    Path(os.environ["RFT_KEEP_RUNNING_FILE"]).write_text("sums-2")
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def run(folder: Path, codes: str, steps: list[int], first: str = "first") -> tuple[int, list[str], list[str]]:
    """Return the exit code, the arguments of each start, and the reports; `steps` are those trained after each start."""
    lives, said = folder / "lives", list[str]()
    left = iter(steps)
    code = keep_running(
        [first],
        lambda name: [f"--resume-{name}"],
        lambda name: next(left),
        said.append,
        pause_s=0.0,
        command=[sys.executable, "-c", LIFE, str(lives), codes],
    )
    return code, lives.read_text().split(), said


def test_a_run_that_fails_or_is_killed_is_resumed_until_it_has_finished(tmp_path: Path) -> None:
    code, lives, said = run(tmp_path, "1,-9,70,0", [3, 4, 9])
    assert (code, lives) == (0, ["first", *["--resume-sums-2"] * 3])
    assert said[1] == "the run sums-2 ended by signal 9 after step 4; --keep-running resumes it in 0 s"


@pytest.mark.parametrize(
    ("code", "steps"),
    [(0, []), (2, []), (143, [])],
    ids=["finished", "a mistake in the configuration", "stopped by SIGTERM"],
)
def test_these_ends_are_final(tmp_path: Path, code: int, steps: list[int]) -> None:
    assert run(tmp_path, str(code), steps) == (code, ["first"], [])


def test_a_run_that_fails_before_its_first_step_is_not_resumed(tmp_path: Path) -> None:
    code, lives, said = run(tmp_path, "1", [0])
    assert (code, lives, said) == (1, ["first"], ["--keep-running does not resume: no step was trained"])


def test_a_run_that_was_not_stored_is_not_confused_with_another_of_its_name(tmp_path: Path) -> None:
    code, lives, said = run(tmp_path, "-9", [7], first="unstored")
    assert (code, lives, said) == (137, ["unstored"], ["--keep-running does not resume: no step was trained"])


def test_ends_without_a_step_in_between_are_limited(tmp_path: Path) -> None:
    code, lives, said = run(tmp_path, "1,1,1,1,1,1,1", [2, 3, 3, 3, 3, 3])
    assert (code, len(lives)) == (1, 6)
    assert said[-1] == "--keep-running does not resume: 5 ends in a row without a trained step"


def test_a_signal_is_passed_on_and_is_final(tmp_path: Path) -> None:
    """The run signals its parent, as a batch system would, and ends in good order when the signal comes back."""
    life = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(3600)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert keep_running([], lambda _: [], lambda _: 5, lambda _: None, command=[sys.executable, "-c", life]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
