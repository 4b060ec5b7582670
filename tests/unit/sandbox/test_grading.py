"""Grading of code by tests of every form, and code that tries to pass without solving the task."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rftcore.rewards.unit_tests import code_of
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.grading.forms import unit_tests
from rftcore.sandbox.grading.grade import Outcome, grade
from rftcore.sandbox.local import LocalSandbox
from rftdata.errors import RftError
from tests.support.sandboxes import sandbox_here
from tests.support.waiting import PATIENCE_S

CONFIG = SandboxConfig(wall_s=PATIENCE_S)

ADD = "import math\ndef add(a, b):\n    return a + b\n"
STACK = """
class Full(Exception): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, item):
        if len(self.items) == 2: raise Full("two")
        self.items.append(item)
    def __len__(self): return len(self.items)
"""
TEST_STACK = """
from solution import Full
def test_push():
    stack = Stack()
    stack.push((1, {2})); stack.push(b"x")
    assert stack.items == [(1, {2}), b"x"] and len(stack) == 2 and isinstance(stack, Stack)
    try: stack.push(3)
    except Full as error: assert str(error) == "two"
    else: assert False
def test_wrong():
    assert Stack().items == [0]
"""
TEST_CASE = """
import unittest
from solution import *
class TestAdd(unittest.TestCase):
    def test_right(self): self.assertEqual(add(1, 2), 3)
    def test_wrong(self): self.assertEqual(add(1, 2), 4)
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    with sandbox_here(CONFIG) as opened:
        yield opened


def passed(sandbox: LocalSandbox, code: str, tests: Any, entry_point: str | None = None) -> list[bool]:
    return [outcome.passed for outcome in grade(sandbox, CONFIG, code, unit_tests(tests, entry_point))]


@pytest.mark.parametrize(
    ("code", "tests", "entry_point", "expected"),
    [
        (ADD, [{"args": [1, 2], "expected": 3}, {"args": [0.1, 0.2], "expected": 0.3}, {"args": [1, 2], "expected": 4}], "add", [True, True, False]),
        (ADD, ["assert add(1, 2) == 3 and math.pi > 3", "assert add(1, 2) == 4"], None, [True, False]),
        (ADD, "def check(candidate):\n    assert candidate('a', b='b') == 'ab'", "add", [True]),
        (ADD, {"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[1, 2]]}, None, [True]),
        (ADD, TEST_CASE, None, [True, False]),
        (STACK, TEST_STACK, None, [True, False]),
        ("def count(n):\n    yield from range(n)", "assert list(count(3)) == [0, 1, 2]", None, [True]),
        ("print(int(input()) * 2)", [{"input": "4\n", "output": "8"}, {"input": "5", "output": "11"}], None, [True, False]),
        ("print(int(input()) * 2)", '{"inputs": ["4\\n"], "outputs": ["8 \\n\\n"]}', None, [True]),
        ("def f(x): return (x, None)", [{"function": "f", "kwargs": {"x": True}, "expected": [True, None]}], None, [True]),
        ("def f(): return 1", [{"function": "f", "expected": True}], None, [False]),
    ],
)  # fmt: skip
def test_tests_of_every_form(
    code: str, tests: Any, entry_point: str | None, expected: list[bool], sandbox: LocalSandbox
) -> None:
    assert passed(sandbox, code, tests, entry_point) == expected


MANY = """
import asyncio, unittest
from concurrent.futures import ThreadPoolExecutor
def test_plain(): assert f(1) == 2
class TestOfPytest:
    def test_it(self): assert f(1) == 2
async def test_async():
    await asyncio.sleep(0)
    assert f(1) == 2
class TestWithFixtures(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.one = 1
    def test_it(self): self.assertEqual(f(self.one), 2)
def test_loop():
    for found, expected in zip(map(g, [1, 2]), [2, 3]): assert found == expected
def test_close(): assert math.isclose(f(1), 2)
def test_threads():
    with ThreadPoolExecutor(8) as pool: assert list(pool.map(f, range(50))) == list(range(1, 51))
def test_message(): assert h(1) == 2, h(1)
unittest.main()
"""


def test_tests_of_every_kind_run_and_the_code_replaces_none_of_their_names(sandbox: LocalSandbox) -> None:
    right = "import math\ndef f(x): return x + 1\ng = h = f"
    assert passed(sandbox, right, MANY) == [True] * 8
    wrong = """
def test_plain(): pass
class TestOfPytest: pass
class math: isclose = staticmethod(lambda *numbers: True)
def f(x): return 99
def g(x): raise StopIteration
def h(x): return 1 << 100_000
"""
    assert passed(sandbox, wrong, MANY) == [False] * 8


def test_tests_that_the_end_of_the_code_leaves_count_as_failed(sandbox: LocalSandbox) -> None:
    dies = "import os\ndef f(x): return 1 if x == 0 else os._exit(0)"
    tests = "\n".join(f"def test_{x}(): assert f({x}) == {x + 1}" for x in range(4))
    outcomes = grade(sandbox, CONFIG, dies, unit_tests(tests, None))
    assert [(each.name, each.passed) for each in outcomes] == [(f"test_{x}", x == 0) for x in range(4)]
    assert passed(sandbox, dies, [f"assert f({x}) == {x + 1}" for x in range(4)]) == [True, False, False, False]


def test_no_message_of_the_code_stops_the_grader(sandbox: LocalSandbox) -> None:
    forges = """
import os
def f(x):
    items = ",".join(str(number * (2**61 - 1)) for number in range(40_000)) if x == 1 else "1" + "0" * 400 + ", 1"
    data = f'{{"value": {{"type": "{["", "set", "complex"][x]}", "items": [{items}]}}}}'.encode()
    data = len(data).to_bytes(4, "big") + data
    while x and data: data = data[os.write(4, data):]
    return 10**400
"""
    started = time.monotonic()
    for calls in ([0, 1], [2]):
        assert not any(passed(sandbox, forges, [{"function": "f", "args": [x], "expected": 0.5} for x in calls]))
    assert time.monotonic() - started < 10


def test_the_code_of_a_response_is_its_last_block() -> None:
    assert code_of("x = 1") == "x = 1"
    assert code_of("```python\nx = 1\n```\nor\n  ``` py \r\nx = 2\n\n```  \nand\n```\nx = 3") == "x = 2\n\n"
    assert code_of("    ```\n```not code```\n") == "    ```\n```not code```\n"
    started = time.monotonic()
    code_of("```a\n" * 200_000 + "```" + " " * 200_000 + "!")
    assert time.monotonic() - started < 5


TEST = "def test():\n    assert f(3) == 9"
SOLVED = "def f(x): return x * x\n"


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import sys\ndef f(x): sys.exit(0)",
        "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\ndef f(x): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return Any(7)",
        "class Any(list):\n    def __eq__(self, other): return True\ndef f(x): return Any([7])",
        "import builtins\nbuiltins.AssertionError = builtins.Exception\nbuiltins.all = lambda each: True\ndef f(x): return 7",
        "def test(): pass\ndef f(x): return 7\ndef check(candidate): pass",
        # The result, and the grader's own modules, within reach of the code.
        ("import os, json\nfor _ in range(99):\n    data = json.dumps({'nonce': '', 'test': 'test', 'failure': None, 'done': True}).encode()\n"
        "    os.write(4, len(data).to_bytes(4, 'big') + data)\ndef f(x): return 7"),
        "import os\nos.write(4, b'\\xff' * 99)\ndef f(x): return 7",
        "import os\ndata = b'{\"value\": ' + b'[' * 3000 + b']' * 3000 + b'}'\nos.write(4, len(data).to_bytes(4, 'big') + data)\ndef f(x): return 7",
        "import os\nos.close(4)\ndef f(x): return 7",
        "import __main__\n__main__.encode = lambda *given: True\n__main__.perform = lambda message: True\ndef f(x): return 7",
        "import rftcore.sandbox.inner.plain_values as values\nvalues.encode = lambda *given: {'type': 'object', 'number': {}}\ndef f(x): return 7",
        "print('1 passed')\ndef f(x): print('OK'); return None",
        "def f(x):\n    raise SystemExit(0)",
        "def f(x):\n    return f(x)",
        "def f(x):\n    value = []\n    for _ in range(100_000): value = [value]\n    return value",
    ],
)  # fmt: skip
def test_code_that_does_not_solve_the_task_does_not_pass(code: str, sandbox: LocalSandbox) -> None:
    assert not all(passed(sandbox, code, TEST))
    assert not all(passed(sandbox, code, [{"function": "f", "args": [3], "expected": 9}]))


def test_the_code_finds_neither_tests_nor_expected_results(sandbox: LocalSandbox) -> None:
    """It searches every file, its memory and its frames while a test calls it."""
    search = """
import gc, os, sys
def f(x):
    secret = b"".join([b"SECRET", b"-9"])
    def within(data): return secret in data
    found = False
    for folder, folders, names in os.walk("/"):
        folders[:] = [each for each in folders if each not in ("dev", "usr", "proc", "root", "lib", "bin", "sbin")]
        for name in names:
            try: found |= within(open(os.path.join(folder, name), "rb").read())
            except OSError: pass
    frame = sys._getframe().f_back
    while frame:
        found |= within(repr(frame.f_locals).encode())
        frame = frame.f_back
    for each in gc.get_objects():
        if isinstance(each, (list, dict, tuple)) and len(each) < 100:
            found |= any(within(part.encode()) for part in each if isinstance(part, str))
    for each in os.listdir("/proc"):
        if each.isdigit(): found |= within(open(f"/proc/{each}/cmdline", "rb").read())
    return found
"""
    tests = unit_tests("def test():\n    secret = 'SECRET-9'\n    assert f(3) is False", None)
    assert grade(sandbox, CONFIG, search, tests) == [Outcome("test", None)]
    assert passed(sandbox, "def f(x): return 'SECRET' + '-9'", "assert f(3) == 'SECRET-9'") == [True]


def test_code_that_takes_too_long_fails_what_it_did_not_finish(sandbox: LocalSandbox) -> None:
    tests = unit_tests("\n".join(f"def test_{x}(): assert f({x}) == {x}" for x in range(3)), None)
    outcomes = grade(sandbox, CONFIG, "def f(x):\n    while x: pass\n    return x", tests, total_s=2.5)
    assert [outcome.failure for outcome in outcomes] == [None, "it took too long", "it took too long"]
    outcomes = grade(
        sandbox, CONFIG, "while True: print('x' * 200_000)", unit_tests([{"input": "", "output": ""}], None)
    )
    assert outcomes[0].failure == "exceeded its limit: output"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, r"the unit tests of the task have no form that can be run.*allowed: Python code"),
        ("", "no form that can be run"),
        ([], "no form that can be run"),
        ([{"input": "1"}], "no form that can be run"),
        ("assert f(", "the unit tests are no Python code: '\\(' was never closed"),
        ("def check(candidate): assert candidate(1) == 2", "define check and do not call it"),
        ([{"args": [1], "expected": 1}], "a unit test names no function"),
        ([{"function": "f", "expected": 1, "stdin": ""}], "a unit test has the key stdin"),
        ({"inputs": [1], "outputs": []}, "the unit tests have 1 inputs and 0 outputs"),
    ],
)
def test_tests_that_have_no_known_form_are_refused(tests: Any, message: str) -> None:
    with pytest.raises(RftError, match=message):
        unit_tests(tests, None)
