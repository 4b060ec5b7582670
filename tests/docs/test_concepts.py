"""docs/concepts.md names the states and the tables that the database has, all of the states, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from rftdata import Buffer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text of a section, without its heading."""
    return re.split(r"^## ", PAGE.split(f"## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def drawn_states(text: str) -> set[str]:
    """The states of the diagram in a section, by the names that it shows."""
    [diagram] = re.findall(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = {alias: name for name, alias in re.findall(r'state "(.+?)" as (\w+)', diagram)}
    ends = {end for arrow in re.findall(r"^ +(\S+) --> (\S+?):", diagram, re.MULTILINE) for end in arrow}
    return {shown.get(end, end) for end in ends - {"[*]"}}


def listed_states(text: str) -> set[str]:
    """The states of the table in a section."""
    return set(re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE))


def test_the_states_of_a_group_are_those_of_the_database(buffer: Buffer) -> None:
    found = buffer.sql("SELECT unnest(enum_range(NULL::rft.group_status))::text AS status").column("status").to_pylist()
    text = section("States of a group")
    assert drawn_states(text) == listed_states(text) == set(found)


def test_the_states_of_an_experience_are_those_of_the_view(buffer: Buffer) -> None:
    # An experience is stored with the rest of its group, which is then sealed.
    found = buffer.sql(
        "SELECT DISTINCT rft.state(status, times, kept, trainable) AS state"
        " FROM unnest(enum_range(NULL::rft.group_status)) AS status,"
        " (VALUES (NULL), (1)) AS u (times), (VALUES (true), (false)) AS k (kept), (VALUES (true), (false)) AS t (trainable)"
        " WHERE status NOT IN ('planned', 'claimed')"
    )
    text = section("States of an experience")
    assert drawn_states(text) == listed_states(text) == set(found.column("state").to_pylist())


def test_every_table_column_and_name_of_the_glossary_exists(buffer: Buffer) -> None:
    known = buffer.sql(
        "SELECT relname AS name FROM pg_class WHERE relnamespace = 'rft'::regnamespace"
        " UNION SELECT proname FROM pg_proc WHERE pronamespace = 'rft'::regnamespace"
        " UNION SELECT attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE c.relnamespace = 'rft'::regnamespace"
    )
    names = set(known.column("name").to_pylist())
    cited = set(re.findall(r"`rft\.([\w.]+)`", PAGE)) | set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE))
    assert len(cited) > 30
    assert [name for name in sorted(cited) if not set(name.split(".")) <= names] == []


def test_the_glossary_is_in_order_and_has_one_row_a_word() -> None:
    words = re.findall(r"^\| ([\w ,]+) \|", section("Glossary"), re.MULTILINE)[1:]
    assert len(words) > 30
    assert words == sorted(set(words))
