"""Several rewards are summed, their values are checked, and a function that hangs or ends its process affects nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.reward import Combination, RewardConfig
from rftcore.explorer.scorer import Scorer
from rftcore.failures import FunctionFailedError
from rftcore.rewards import load_rewards
from rftcore.user_functions import function_processes
from rftcore.workflows.task import Score, Task, Turn
from rftdata.errors import ConfigError, PluginError, RftError
from rftdata.experience import Sequence
from rftdata.processes import process_lives
from tests.support.waiting import PATIENCE_S, wait_until, wait_until_ended

TASK = Task(1, "sums", "one", "1+1=", "2")
TURN = Turn([], "2", "stop", Sequence("1+1=", "2", [1, 2], 1, "stop"))

Make = Callable[..., Scorer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A scorer of functions in files, ended after the test."""
    made = []

    def build(
        entries: list[Any],
        *,
        combination: Combination = "sum",
        timeout_s: float = PATIENCE_S,
        max_processes: int = 2,
        **files: str,
    ) -> Scorer:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        rewards = load_rewards([RewardConfig.model_validate(entry) for entry in entries], tmp_path)
        made.append(
            Scorer(rewards, tmp_path, combination=combination, timeout_s=timeout_s, max_processes=max_processes)
        )
        return made[-1]

    yield build
    for scorer in made:
        scorer.close()


def scored(scorer: Scorer) -> Score:
    return asyncio.run(scorer(TURN, TASK))


def test_values_of_functions_and_mappings_are_summed(make: Make) -> None:
    a = "def score(turn, task):\n    return {'length': 0.25, 'form': 0.5}"
    found = scored(make(["exact_match", "./a.py:score"], a=a))
    assert found == Score(1.75, {"exact_match": 1.0, "length": 0.25, "form": 0.5})


def test_two_functions_of_one_name_both_count(make: Make) -> None:
    a, b = "def score(turn, task):\n    return 1", "async def score(turn, task):\n    return 2"
    found = scored(make(["./a.py:score", "./b.py:score"], a=a, b=b))
    assert found == Score(3.0, {"score": 1.0, "./b.py:score": 2.0})


def test_two_parts_of_one_name_both_count(make: Make) -> None:
    a, b = "def f(turn, task):\n    return {'form': 1}", "def g(turn, task):\n    return {'form': 2}"
    found = scored(make(["./a.py:f", "./b.py:g"], a=a, b=b))
    assert found == Score(3.0, {"form": 1.0, "./b.py:g.form": 2.0})


GIVES = """
class Gives:
    "A reward of its argument."

    runs_in_explorer = True

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, turn, task):
        if self.value > 90:
            raise RuntimeError("called after a failure")
        return self.value
"""


def gives(name: str, value: object, **keys: Any) -> dict[str, Any]:
    return {"name": "./gives.py:Gives", "as": name, "value": value, **keys}


@pytest.mark.parametrize(
    ("combination", "rewards", "total", "parts"),
    [
        ("sum", [gives("a", 2, weight=0.25), gives("b", -1), gives("seen", 7, weight=0)], -0.5, [2, -1, 7]),
        ("product", [gives("a", 0.25, weight=0.5), gives("b", 3), gives("seen", -7, weight=0)], 1.5, [0.25, 3, -7]),
        ("product", [gives("a", 0), gives("b", 3)], 0.0, [0, 3]),
        ("first_failure", [gives("a", 1, weight=0.2), gives("b", 0), gives("c", 99)], 0.2, [1, 0]),
        ("first_failure", [gives("a", -1), gives("c", 99)], -1.0, [-1]),
        ("first_failure", [gives("a", 0.4, threshold=0.5), gives("c", 99)], 0.4, [0.4]),
        ("first_failure", [gives("a", -0.3, threshold=-0.5), gives("b", 1)], 0.7, [-0.3, 1]),
    ],
)
def test_rewards_combine_and_their_parts_are_stored_without_weights(
    combination: Combination, rewards: list[dict[str, Any]], total: float, parts: list[float], make: Make
) -> None:
    found = scored(make(rewards, combination=combination, gives=GIVES))
    assert found.reward == pytest.approx(total)
    assert found.parts == dict(zip([reward["as"] for reward in rewards], parts, strict=False))


def test_a_product_of_a_negative_value_is_refused_with_the_task(make: Make) -> None:
    with pytest.raises(RftError, match="reward a returned -1 for the task 'one' of 'sums', and rewards are multiplied"):
        scored(make([gives("a", -1)], combination="product", gives=GIVES))


def test_a_total_that_is_no_number_is_refused(make: Make) -> None:
    with pytest.raises(RftError, match="rewards of the task 'one' of 'sums' combine to inf, with 1e\\+38 of a"):
        scored(make([gives("a", 1e38, weight=20)], combination="product", gives=GIVES.replace("> 90", "> 1e300")))


def test_a_part_whose_names_are_all_taken_gets_a_number(make: Make) -> None:
    a = "async def f(turn, task):\n    return {'exact_match': 0.5}"
    found = scored(make(["./a.py:f", "exact_match"], a=a))
    assert found == Score(1.5, {"exact_match": 0.5, "exact_match#2": 1.0})


def test_one_function_with_other_arguments_is_another_part(make: Make) -> None:
    a = "def near(turn, task, *, to: int, scale: float = 1.0):\n    return {'by': abs(int(turn.response) - to) * scale}"
    found = scored(
        make([{"name": "./a.py:near", "as": "three", "to": "3", "scale": 0.5}, {"name": "./a.py:near", "to": 4}], a=a)
    )
    assert found == Score(2.5, {"three.by": 0.5, "by": 2.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"to": 1, "scal": 3},
            r"the reward './a\.py:near': there is no key 'explorer\.reward\.scal'.*allowed: to, scale.*did you mean 'scale'",
        ),
        ({}, r"'explorer\.reward\.to' is missing"),
        ({"to": 1.5}, r"'explorer\.reward\.to' is wrong: Input should be a valid integer"),
    ],
)
def test_arguments_that_a_reward_does_not_take_are_refused(arguments: dict[str, Any], message: str, make: Make) -> None:
    a = "def near(turn, task, *, to: int, scale: float = 1.0):\n    return 1.0"
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        make([{"name": "./a.py:near", **arguments}], a=a)


def test_no_reward_is_zero(make: Make) -> None:
    assert scored(make([])) == Score(0.0, {})


def test_numbers_of_numpy_count(make: Make) -> None:
    a = "import numpy\ndef score(turn, task):\n    return {'a': numpy.float32(0.5), 'b': numpy.int64(2)}"
    assert scored(make(["./a.py:score"], a=a)) == Score(2.5, {"a": 0.5, "b": 2.0})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("None", "returned nothing"),
        ("'1.0'", r"returned '1\.0', a value of type str"),
        ("True", "of type bool"),
        ("float('nan')", "not finite"),
        ("float('-inf')", "not finite"),
        ("[1.0]", "of type list"),
        ("turn.sequence.__reduce_ex__", "of type builtin_function_or_method"),  # what cannot be sent
        ("{'form': None}", "part 'form', returned nothing"),
    ],
)
def test_a_value_that_is_not_a_finite_number_is_refused_with_the_task(value: str, what: str, make: Make) -> None:
    # Half of them in the event loop, half in a process.
    a = f"{'async ' if len(value) % 2 else ''}def score(turn, task):\n    return {value}"
    with pytest.raises(RftError, match=f"{what}.*allowed: a finite number") as raised:
        scored(make(["./a.py:score"], a=a))
    assert "the task 'one' of 'sums'" in str(raised.value) and "./a.py:score" in str(raised.value)


def test_an_error_of_a_plain_function_names_its_line_and_its_callers(make: Make) -> None:
    a = "def score(turn, task):\n    return check(turn)\n\ndef check(turn):\n    return turn.answr == 1\n"
    with pytest.raises(FunctionFailedError) as raised:
        scored(make(["./a.py:score"], a=a))
    assert raised.value.text == "AttributeError: 'Turn' object has no attribute 'answr' (a.py, line 5, in check)"
    assert "line 2, in score\n    return check(turn)" in raised.value.stack
    assert "function_process" not in raised.value.stack, "only the user's frames"


def test_plain_functions_run_in_the_main_thread_of_another_process(make: Make) -> None:
    a = "import os, threading\ndef score(turn, task):\n    return {'pid': os.getpid(), 'main': int(threading.current_thread() is threading.main_thread())}"
    parts = scored(make(["./a.py:score"], a=a)).parts
    assert parts["pid"] != os.getpid() and parts["main"] == 1


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("while True: pass", 4),
        ("time.sleep(1000)", 4),
        ("re.match('(a+)+$', 'a' * 40 + 'b')", 4),  # C code that keeps the interpreter's lock
    ],
)
def test_a_plain_function_that_hangs_is_ended_and_named_and_the_next_call_answers(
    body: str, line: int, make: Make
) -> None:
    a = f"import re, time\ndef score(turn, task):\n    if task.task_key == 'one':\n        {body}\n    return 1.0\n"
    # The next call has the same limit, so it must not be short for a call that returns at once.
    scorer = make(["./a.py:score"], timeout_s=3.0, a=a)
    with pytest.raises(FunctionFailedError, match=r"explorer\.reward_timeout_s = 3 s") as raised:
        scored(scorer)
    assert raised.value.timed_out and f"(a.py, line {line}, in score)" in raised.value.text
    assert "on task 'one'" in raised.value.text
    assert asyncio.run(scorer(TURN, Task(2, "sums", "two", "", None))).reward == 1.0


@pytest.mark.parametrize(
    ("body", "how"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 11)", "Segmentation fault")]
)
def test_a_function_that_ends_its_process_fails_alone(body: str, how: str, make: Make) -> None:
    a = f"import os\ndef score(turn, task):\n    if task.task_key == 'one':\n        {body}\n    return 1.0\n"
    scorer = make(["./a.py:score"], a=a)
    with pytest.raises(FunctionFailedError, match=how) as raised:
        scored(scorer)
    assert not raised.value.timed_out
    assert asyncio.run(scorer(TURN, Task(2, "sums", "two", "", None))).reward == 1.0


def test_a_process_that_was_ended_between_two_calls_is_replaced(make: Make) -> None:
    a = "import os\ndef score(turn, task):\n    return os.getpid()\n"
    scorer = make(["./a.py:score"], a=a)
    first = int(scored(scorer).reward)
    os.kill(first, signal.SIGKILL)
    # All of its threads have ended: until then it cannot be waited for.
    wait_until(lambda: os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the end of the process")
    pids = [int(scored(scorer).reward) for _ in range(3)]
    assert first not in pids and len(set(pids)) == 1


def test_processes_that_a_function_started_end_with_its_time_limit(make: Make, tmp_path: Path) -> None:
    a = f"import subprocess\ndef score(turn, task):\n    subprocess.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; sleep 1000'])\n"
    pid = tmp_path / "pid"
    for timeout_s in (1.5, 15.0, PATIENCE_S):  # the longer ones for a machine on which the command had not begun
        with pytest.raises(FunctionFailedError, match="reward_timeout_s"):
            scored(make(["./a.py:score"], timeout_s=timeout_s, a=a))
        if pid.exists() and pid.read_text():
            break
    wait_until_ended([int(pid.read_text())])


def test_a_file_named_like_a_module_does_not_take_its_place(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ValueError('the wrong random')")
    monkeypatch.chdir(tmp_path)
    assert scored(make(["./a.py:score"], a="def score(turn, task):\n    return 1.0")).reward == 1.0


def test_the_first_call_that_hangs_is_named_even_long_after_loading(make: Make) -> None:
    a = "def score(turn, task):\n    while True:\n        pass\n"
    with pytest.raises(FunctionFailedError, match=r"\(a\.py, line [23], in score\)"):
        scored(make(["./a.py:score"], timeout_s=8.0, a=a))


def test_slow_functions_get_several_processes_and_quick_ones_do_with_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = tmp_path / "met"
    met.mkdir()
    a = (
        "import os, pathlib, time\n"
        "def slow(turn, task):\n"
        f"    met = pathlib.Path({str(met)!r})\n"
        "    (met / str(os.getpid())).touch()\n"
        "    while len(list(met.iterdir())) < 3:\n        time.sleep(0.02)\n"  # returns once there are three processes
        "    return os.getpid()\n"
        "def quick(turn, task):\n    return os.getpid()\n"
    )

    async def pids(name: str) -> set[float]:
        scorer = make([f"./a.py:{name}"], max_processes=3, a=a)
        return {score.reward for score in await asyncio.gather(*(scorer(TURN, TASK) for _ in range(12)))}

    assert asyncio.run(pids("slow")) <= {float(path.name) for path in met.iterdir()}
    assert len(list(met.iterdir())) == 3
    # A quick call is over before the wait for a free process is, even on a busy machine.
    monkeypatch.setattr(function_processes, "_CROWDED_S", PATIENCE_S)
    assert len(asyncio.run(pids("quick"))) == 1


def test_a_function_that_does_not_load_is_refused(make: Make) -> None:
    with pytest.raises(PluginError, match="does not load"):
        make(["./a.py:score"], a="import nothing_of_this_name")


def test_processes_end_with_the_scorer_even_when_they_hang(make: Make, tmp_path: Path) -> None:
    a = f"import os, time\ndef score(turn, task):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    time.sleep(1000)\n"
    scorer = make(["./a.py:score"], a=a)

    def call() -> None:
        with pytest.raises(FunctionFailedError):
            scored(scorer)

    thread = threading.Thread(target=call)
    thread.start()
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text(), "the call")
    scorer.close()
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()
    assert not process_lives(int(pid.read_text()))


@pytest.mark.parametrize(("num", "slow"), [(100, 40), (16, 0)])
def test_a_call_that_hangs_delays_no_other(make: Make, num: int, slow: int) -> None:
    """Quick calls go to a process several at a time; those behind one that hangs go to another process."""
    a = (
        "import time\n"
        "def score(turn, task):\n"
        "    if task.task_key == 'slow' and task.metadata['hangs']:\n        time.sleep(1000)\n"
        "    return float(task.task_id)\n"
    )
    scorer = make(["./a.py:score"], max_processes=2, a=a)
    hangs = [number == slow for number in range(num)]

    async def score() -> None:
        await asyncio.gather(
            *(scorer(TURN, Task(n, "sums", "quick", "", None)) for n in range(100))
        )  # it is known to be quick
        tasks = [Task(n, "sums", "slow", "", None, {"hangs": hang}) for n, hang in enumerate(hangs)]
        running = [asyncio.create_task(scorer(TURN, task)) for task in tasks]
        others = [call for call, hang in zip(running, hangs, strict=True) if not hang]
        assert [score.reward for score in await asyncio.gather(*others)] == [float(n) for n in range(num) if n != slow]
        assert not running[slow].done()
        running[slow].cancel()

    asyncio.run(score())


def test_an_error_that_exists_in_its_process_only_is_that_of_its_call(make: Make) -> None:
    a = (
        "from rftdata.errors import RftError\n"
        "def score(turn, task):\n"
        "    if task.task_id == 3:\n"
        "        global Own\n        Own = type('Own', (), {'__module__': __name__})\n        raise RftError('mine', value=Own())\n"
        "    return float(task.task_id)\n"
    )
    scorer = make(["./a.py:score"], max_processes=1, a=a)

    async def score() -> list[Score | BaseException]:
        calls = (scorer(TURN, Task(n, "sums", str(n), "", None)) for n in range(8))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(score())
    error = found.pop(3)
    assert isinstance(error, FunctionFailedError) and "cannot be read here" in error.text
    assert [score.reward for score in found if isinstance(score, Score)] == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("ends", ["sys.exit(0)", "1 / 0", "return 7.0"])
def test_a_fork_that_leaves_its_function_ends_and_answers_nothing(ends: str, make: Make) -> None:
    a = (
        "import faulthandler, os, sys\n"
        "def score(turn, task):\n"
        "    faulthandler.cancel_dump_traceback_later()\n"
        "    child = os.fork()\n"
        f"    if not child:\n        {ends}\n"
        "    os.waitpid(child, 0)\n"
        "    return float(task.task_id)\n"
    )
    scorer = make(["./a.py:score"], a=a)

    async def score() -> list[float]:
        calls = [scorer(TURN, Task(n, "sums", str(n), "", None)) for n in range(4)]
        return [score.reward for score in await asyncio.gather(*calls)]

    assert asyncio.run(score()) == [0.0, 1.0, 2.0, 3.0]


def test_a_time_limit_that_a_function_leaves_behind_reaches_no_other_call(make: Make) -> None:
    a = (
        "import signal, time\n"
        "def late(*_):\n    raise TimeoutError('left behind')\n"
        "def score(turn, task):\n"
        "    if task.task_id == 0:\n"
        "        signal.signal(signal.SIGALRM, late)\n        signal.setitimer(signal.ITIMER_REAL, 0.2)\n        raise ValueError('first')\n"
        "    time.sleep(0.4)\n"
        "    return 1.0\n"
    )
    scorer = make(["./a.py:score"], max_processes=1, a=a)
    with pytest.raises(FunctionFailedError, match="first"):
        asyncio.run(scorer(TURN, Task(0, "sums", "0", "", None)))
    assert asyncio.run(scorer(TURN, Task(1, "sums", "1", "", None))).reward == 1.0


def test_a_process_that_a_function_started_with_the_socket_open_does_not_delay_the_end(
    make: Make, tmp_path: Path
) -> None:
    a = (
        "import os, time\n"
        "def score(turn, task):\n"
        "    if not os.fork():\n        os.setsid()\n        time.sleep(1000)\n"
        f"    open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "    time.sleep(1000)\n"
    )
    scorer = make(["./a.py:score"], a=a)

    def call() -> None:
        with pytest.raises(FunctionFailedError):
            scored(scorer)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until((tmp_path / "ready").exists, "the call")
    closing = threading.Thread(target=scorer.close)
    closing.start()
    closing.join(timeout=20.0)
    assert not closing.is_alive(), "it waits for the limit of the call"
    thread.join(timeout=PATIENCE_S)
