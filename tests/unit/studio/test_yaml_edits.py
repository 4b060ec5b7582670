"""An edit of one key leaves the rest of a configuration's text as it was."""

from __future__ import annotations

import contextlib
import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcore.config.run import config_mistakes
from rftcore.studio.config_form import section_fields, section_names
from rftcore.studio.config_runs import mapping_of, run_names
from rftcore.studio.texts import exact
from rftcore.studio.yaml_edits import with_value
from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

TEXT = """# head
run: {name: sort-sft, seed: 1}  # the run
trainer:
  # how fast
  learning_rate: 2.0e-3  # peak
  optimizer: {weight_decay: 0.01}
tasks:
  - {name: a}   # first
  - name: b
empty:
# end of tasks
steps: 300
"""


def changed(text: str, new: str) -> list[str]:
    return [line for line in difflib.ndiff(text.splitlines(), new.splitlines()) if line[0] in "+-"]


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        (
            "run.seed",
            "7",
            ["- run: {name: sort-sft, seed: 1}  # the run", "+ run: {name: sort-sft, seed: 7}  # the run"],
        ),
        ("run.seed", None, ["- run: {name: sort-sft, seed: 1}  # the run", "+ run: {name: sort-sft}  # the run"]),
        ("run.name", "12", ["- run: {name: sort-sft, seed: 1}  # the run", "+ run: {name: '12', seed: 1}  # the run"]),
        ("trainer.learning_rate", "1e-4", ["-   learning_rate: 2.0e-3  # peak", "+   learning_rate: 1e-4  # peak"]),
        ("trainer.learning_rate", None, ["-   learning_rate: 2.0e-3  # peak"]),
        ("trainer.epochs", "4", ["+   epochs: 4"]),
        ("trainer.optimizer.weight_decay", None, ["-   optimizer: {weight_decay: 0.01}"]),
        ("sync.offset", "3", ["+ sync:", "+   offset: 3"]),
        ("monitor", "- a\n- b", ["+ monitor: [a, b]"]),
        ("empty.key", "[1, 2]", ["- empty:", "+ empty: {key: [1, 2]}"]),
    ],
)
def test_only_the_key_changes(key: str, value: str | None, difference: list[str]) -> None:
    new = with_value(TEXT, key, value, is_text=key == "run.name")
    assert sorted(changed(TEXT, new)) == sorted(difference)


def test_an_empty_text_gets_sections() -> None:
    assert with_value("", "run.name", "x") == "run:\n  name: x\n"
    assert with_value("# only a comment", "steps", "3") == "# only a comment\nsteps: 3\n"


@pytest.mark.parametrize("key", ["tasks", "steps"])
def test_comments_within_a_value_and_aliases_are_left_to_the_text(key: str) -> None:
    text = TEXT.replace("seed: 1", "seed: &n 1").replace("steps: 300", "steps: *n") if key == "steps" else TEXT
    with pytest.raises(ConfigError, match="change it in the text"):
        with_value(text, key, "7")


@given(
    st.text(
        st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufeff\ufffe\uffff\u2028\u2029\x85"),
        min_size=1,
    )
)
def test_any_line_of_text_arrives_as_it_was_typed(value: str) -> None:
    new = with_value(TEXT, "run.name", value, is_text=True)
    assert read_yaml(new, "it")["run"] == {"name": value, "seed": 1}
    assert changed(TEXT, new)[1:] == [line for line in changed(TEXT, new) if line.startswith("+ run")]


# Each is YAML for its scanner or its parser, and a trap for what reads values.
TRAPS = (
    "a: 2020-13-45",
    "a: 9" + "9" * 5000,
    "run: {seed: 0x" + "f" * 5000 + "}",
    "a: !!int x",
    "a: !!int ''",
    "a: !!bool x",
    "a: !!timestamp x",
    'run: {name: "\\ud800"}',
    'run: {name: "a\\0b"}',
    "run: &a {name: *a}",
    "&a [*a]",
    "a: &a {<<: *a}",
    "run: !!set {a}",
    "run: !!binary aGk=",
    "2020-01-01: 3",
    "{2020-01-01: x}",
    "run: {name: 2020-01-01 00:00:00+99:99}",
    'a: "\\U00110000"',
    "a: [",
    "a: 1\n---\nb: 2",
    "- " * 290 + "x",
    "stages: [{name: {a: b}}]\nrun: 3",
)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: repr(trap[:30]))
def test_what_cannot_be_read_is_refused_in_words(trap: str) -> None:
    for key, error in config_mistakes(trap, "the file"):
        assert isinstance(key, str) and str(error)
    config = mapping_of(trap)
    assert all(name.isprintable() for name in run_names(trap))
    for section in section_names():
        "".join(str(exact(each.value or "")) for each in section_fields(section, config)).encode()
    for text, value in ((trap, "1"), (trap, None), ("", trap), (TEXT, trap)):
        with contextlib.suppress(ConfigError):
            new = with_value(text, "run.seed", value)
            assert value is None or read_yaml(new, "it")["run"]["seed"] == read_yaml(value, "it")


def test_a_value_that_is_none_of_its_kind_is_named_with_its_line() -> None:
    ((key, error),) = config_mistakes("run: {name: x}\nsteps: 2020-13-45\n", "a.yaml")
    assert key == "" and "the value '2020-13-45' is no timestamp: month must be in 1..12" in str(error)
    assert "line 2, column 8" in str(error)
    with pytest.raises(ConfigError, match="the text is not valid YAML"):
        with_value("a: [", "run.seed", "1")
