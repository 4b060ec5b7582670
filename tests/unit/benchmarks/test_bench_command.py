"""`rft bench` lists every benchmark with a sentence, and each refuses arguments that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness.report import machine

ROOMS = Path(benchmarks.__file__).parent


def test_the_list_has_every_benchmark_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(BENCHMARKS)
    assert all(line.endswith(".") for line in lines)
    programs = {
        ".".join(path.relative_to(ROOMS).with_suffix("").parts)
        for path in ROOMS.glob("*/*.py")
        if "def main(arguments:" in path.read_text(encoding="utf-8")
    }
    assert programs == {module for module, _ in BENCHMARKS.values()}


def test_an_unknown_benchmark_is_refused_with_the_allowed_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_benchmark"]) == 2
    said = capsys.readouterr().err
    assert "'no_such_benchmark'" in said and all(name in said for name in BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_explains_itself_and_refuses_unknown_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and f"usage: rft bench {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([name, "--target", "1", "--no-such-option"])
    assert ended.value.code == 2 and "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["buffer", "--rounds", "0"], "argument --rounds: 0 is too small; allowed: 1 or more"),
        (["buffer", "--rounds", "two"], "argument --rounds: 'two' is not a whole number"),
        (["sampling", "--rows", "9000,many"], "argument --rows: '9000,many' is not whole numbers with commas"),
        (["soak", "--minutes", "-1"], "argument --minutes: -1 is too small; allowed: a number above 0"),
        (["algorithms", "--algorithms", "grpo,grop"], "argument --algorithms: unknown: grop; allowed: "),
        (["pipeline", "--rows", "100"], "argument --rows: 100 is not a multiple of 8"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and problem in capsys.readouterr().err


def test_results_describe_the_machine() -> None:
    found = machine()
    assert found["cores"] >= 1 and found["memory_gib"] > 0 and (found["commit"] is None or len(found["commit"]) == 40)
