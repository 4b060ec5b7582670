"""Databases and questions from a seed: two tables of a small world, and a question with the query that answers it.

Names of people are unique, and amounts are whole numbers, so that each question has one answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = (1, 2, 3)
_NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Ida",
    "Jan",
    "Kim",
    "Leo",
    "Mia",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Uwe",
    "Vera",
    "Will",
    "Xenia",
    "Yara",
    "Zoe",
    "Amir",
    "Bea",
    "Carl",
    "Dora",
    "Emil",
]


@dataclass(frozen=True)
class Question:
    """A question about a database.

    Attributes:
        database: statements that create and fill the tables, without a semicolon within a statement.
        tables: the statements that create them, as the policy reads them.
        query: one that answers the question.
    """

    database: tuple[str, ...]
    tables: str
    text: str
    query: str


@dataclass(frozen=True)
class _World:
    """Two tables: people, and what each of them did.

    Attributes:
        people, place, number: the table, and its columns beside id and name.
        deeds, kind, amount: the table, and its columns beside id and person.
        person: column of deeds that refers to people.
    """

    people: str
    place: str
    places: tuple[str, ...]
    number: str
    deeds: str
    person: str
    kind: str
    kinds: tuple[str, ...]
    amount: str


_WORLDS = (
    _World(
        "customers", "city", ("Bonn", "Graz", "Lyon", "Oslo"), "age",
        "orders", "customer_id", "status", ("open", "paid", "sent", "returned"), "price",
    ),
    _World(
        "students", "school", ("North", "South", "Hill", "Lake"), "age",
        "exams", "student_id", "subject", ("history", "biology", "music", "physics"), "points",
    ),
    _World(
        "drivers", "depot", ("Harbour", "Airport", "Station"), "years",
        "trips", "driver_id", "vehicle", ("van", "truck", "bike", "bus"), "km",
    ),
    _World(
        "readers", "library", ("Central", "West", "East"), "age",
        "loans", "reader_id", "genre", ("crime", "poetry", "travel", "science"), "days",
    ),
    _World(
        "players", "club", ("Reds", "Blues", "Greens", "Lions"), "height",
        "matches", "player_id", "result", ("won", "lost", "drawn"), "goals",
    ),
)  # fmt: skip
# Level, question and query. Their words are those of the world, and a kind, a place, and a number that is near the middle of its column.
_QUESTIONS = (
    (1, "How many {deeds} have the {kind} '{a_kind}'?", "SELECT count(*) FROM {deeds} WHERE {kind} = '{a_kind}'"),
    (1, "How many {people} have the {place} '{a_place}'?", "SELECT count(*) FROM {people} WHERE {place} = '{a_place}'"),
    (1, "What is the largest {amount} of all {deeds}?", "SELECT max({amount}) FROM {deeds}"),
    (1, "How many {people} have a value of {number} above {a_number}?", "SELECT count(*) FROM {people} WHERE {number} > {a_number}"),
    (1, "What are the names of the {people} with the {place} '{a_place}'?", "SELECT name FROM {people} WHERE {place} = '{a_place}'"),
    (2, "How many {people} are there for each {place}? Give the {place} and the number.", "SELECT {place}, count(*) FROM {people} GROUP BY {place}"),
    (2, "What is the sum of {amount} for each {kind} of {deeds}? Give the {kind} and the sum.", "SELECT {kind}, sum({amount}) FROM {deeds} GROUP BY {kind}"),
    (2, "Which values of {kind} occur in more than {a_count} {deeds}?", "SELECT {kind} FROM {deeds} GROUP BY {kind} HAVING count(*) > {a_count}"),
    (2, "How many different {person}s have {deeds} with the {kind} '{a_kind}'?", "SELECT count(DISTINCT {person}) FROM {deeds} WHERE {kind} = '{a_kind}'"),
    (3, "What is the sum of {amount} of the {deeds} for each {place} of the {people}? Give the {place} and the sum.",
     "SELECT {place}, sum({amount}) FROM {people} JOIN {deeds} ON {deeds}.{person} = {people}.id GROUP BY {place}"),
    (3, "What are the names of the {people} without {deeds} of the {kind} '{a_kind}'?",
     "SELECT name FROM {people} WHERE id NOT IN (SELECT {person} FROM {deeds} WHERE {kind} = '{a_kind}')"),
    (3, "What are the names of the {people} whose {deeds} have a sum of {amount} above {a_sum}?",
     "SELECT name FROM {people} JOIN {deeds} ON {deeds}.{person} = {people}.id GROUP BY name HAVING sum({amount}) > {a_sum}"),
    (3, "What is the largest {amount} of the {deeds} with the {kind} '{a_kind}' for each {place} of the {people}? Give the {place} and the largest {amount}.",
     "SELECT {place}, max({amount}) FROM {people} JOIN {deeds} ON {deeds}.{person} = {people}.id WHERE {kind} = '{a_kind}' GROUP BY {place}"),
)  # fmt: skip


def question(seed: int, levels: tuple[int, ...] = LEVELS, rows: int = 12) -> Question:
    """Return a database and a question about it; equal arguments give equal ones.

    Args:
        levels: of difficulty: 1 one table, 2 groups, 3 both tables.
        rows: number of people, 30 at most; each has up to five deeds.
    """
    chance = random.Random(seed)
    world = chance.choice(_WORLDS)
    people = [
        (place + 1, name, chance.choice(world.places), chance.randint(18, 70))
        for place, name in enumerate(chance.sample(_NAMES, rows))
    ]
    deeds = [
        (person, chance.choice(world.kinds), chance.randint(1, 100))
        for person, *_ in people
        for _ in range(chance.randint(0, 5))
    ] or [(1, world.kinds[0], 1)]
    tables = (
        f"CREATE TABLE {world.people} (id INTEGER, name TEXT, {world.place} TEXT, {world.number} INTEGER)",
        f"CREATE TABLE {world.deeds} (id INTEGER, {world.person} INTEGER, {world.kind} TEXT, {world.amount} INTEGER)",
    )
    numbered = [(place + 1, *deed) for place, deed in enumerate(deeds)]
    filled = (_insert(world.people, people), _insert(world.deeds, numbered))
    words = {
        **vars(world),
        "a_kind": chance.choice([kind for _, kind, _ in deeds]),
        "a_place": chance.choice([place for _, _, place, _ in people]),
        "a_number": chance.randint(30, 58),
        "a_count": max(1, len(deeds) // len(world.kinds)),
        "a_sum": chance.randint(50, 200),
    }
    _, text, query = chance.choice([one for one in _QUESTIONS if one[0] in levels])
    return Question((*tables, *filled), ";\n".join(tables) + ";", text.format(**words), query.format(**words))


def _insert(table: str, rows: Sequence[tuple[object, ...]]) -> str:
    return f"INSERT INTO {table} VALUES " + ", ".join(
        "(" + ", ".join(f"'{value}'" if isinstance(value, str) else str(value) for value in row) + ")" for row in rows
    )
