"""Values, names and paths that no page sends: each is told what is wrong with it, none is a defect, and nothing is half applied."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

import rftdata
from rftcore.studio.pages import all_pages
from rftdata.annotations import LabelKind, define_kinds, standing
from rftdata.annotations.kinds import retire_kind
from tests.store.studio.test_studio_security import raw_answer
from tests.support.studio_run import HOSTILE, KINDS
from tests.support.studio_site import FROM_HERE, PASSWORD, Site, account, open_site

SHARP = ("", "-1", "9" * 5000, "nan", "\0", "[" * 3000, '[[1e400], "x"]', HOSTILE[4])
VALUES = (
    *SHARP,
    str(2**31),
    str(2**63),
    "1e999",
    "٣",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    '{"a": NaN}',
    "%s %(x)s {0} {x}",
    "'; DROP TABLE rft.label; --",
    "../../etc/passwd",
    *HOSTILE[:2],
    "x" * 70_000,
)
# Of forms whose fields depend on the kind.
FIELDS = (
    "item",
    "value",
    "shown",
    "order",
    "version",
    "seconds",
    "key",
    "question",
    "count",
    "holding",
    "run",
    "spans",
)
FIELDS += ("reason", "own", "tag.x", "turn.0", "turn.x", "criterion.clarity", "criterion.correctness", "label_batch_id")
# Of texts and values of a configuration.
YAML = (
    "a: [",
    "a: 2020-13-45",
    "a: !!bool x",
    '"\\U00110000"',
    "&a [*a]",
    "{2020-01-01: x}",
    'run: {name: "\\ud800\\0"}',
)
CONFIG = "run: {name: attacked}\nsteps: 1\n"
OF_KINDS = ("value", "shown", "order", "spans", "own", "turn.0", "criterion.clarity")
STATE = "SELECT (SELECT count(*) FROM rft.label) + (SELECT count(*) FROM rft.annotation) AS n, (SELECT sum(reward) FROM rft.experience) AS rewards"


@pytest.fixture(autouse=True, scope="module")
def _kinds(studio_buffer: rftdata.Buffer) -> None:
    define_kinds(studio_buffer, KINDS, author="olga")


@pytest.fixture(scope="module")
def site(studio_buffer: rftdata.Buffer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("configs")
    (folder / "attacked.yaml").write_text(CONFIG)
    with open_site(studio_buffer, configs=folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def owner(site: Site) -> Iterator[httpx.Client]:
    with site.owner() as client:
        yield client


def routes() -> list[APIRoute]:
    return [route for _, router in all_pages() for route in router.routes if isinstance(route, APIRoute)]


def requests_of(route: APIRoute) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield method, path and fields of requests with each value in each parameter of a route, the others being plausible."""
    dependant = route.dependant
    in_path = [each.name for each in dependant.path_params]
    others = [each.name for each in (*dependant.query_params, *dependant.body_params)]
    method = "POST" if "POST" in (route.methods or ()) else "GET"
    if method == "POST" and not dependant.body_params:
        others = [*others, *FIELDS]
    plausible = {"target": "experience", "choice": "pass", "reward": "1", "query": "SELECT 1", "value": "true"}
    if is_config := route.path.startswith("/config"):
        plausible |= {"file": "attacked.yaml", "text": CONFIG, "section": "run", "key": "run.name"}

    def path(**values: str) -> str:
        return route.path.format(**{name: values.get(name, plausible.get(name, "1")) for name in in_path})

    of_kinds = (
        [(kind.kind, name) for kind in KINDS[1:] for name in OF_KINDS] if route.path.endswith("{kind}/answer") else []
    )
    for kind, name in [*(("helpful", name) for name in others), *of_kinds]:
        values = SHARP if is_config or others[-1:] == [FIELDS[-1]] else VALUES
        for value in (*values, *(YAML if is_config and name in ("text", "value") else ())):
            sent = value[:5000] if method == "GET" else value  # the client sends no longer addresses
            yield method, path(kind=kind), {each: plausible.get(each, "1") for each in others} | {name: sent}
    for name, value in itertools.product(in_path, VALUES[:-1]):
        quoted = (
            httpx.QueryParams({"x": value.replace("/", "")[:1000]}).__str__().removeprefix("x=").replace("+", "%20")
        )
        yield method, path(**{name: quoted or "%20"}), {each: plausible.get(each, "1") for each in others}


def is_unsafe(answer: httpx.Response) -> bool:
    """Return whether a page has markup or bidirectional characters of what was sent, other than in the field in which a person has typed it."""
    printed = re.sub(r"<textarea.*?</textarea>|<input[^>]*>", "", answer.text, flags=re.DOTALL)
    return "json" not in answer.headers.get("content-type", "") and ("\u202e" in printed or "<img src=x" in answer.text)


@pytest.mark.parametrize("route", routes(), ids=lambda route: f"{min(route.methods)} {route.path}")
def test_no_value_is_a_defect(owner: httpx.Client, route: APIRoute) -> None:
    defects = []
    for method, path, fields in requests_of(route):
        sent = {"params": fields} if method == "GET" else {"data": fields}
        answer = owner.request(method, path, **sent)  # type: ignore[arg-type]
        if answer.status_code >= 500 or is_unsafe(answer):
            defects.append(
                (method, path[:200], {name: value[:60] for name, value in fields.items()}, answer.status_code)
            )
    assert defects[:5] == []


def test_what_attacks_have_written_is_what_the_database_allows(studio_buffer: rftdata.Buffer) -> None:
    rows = studio_buffer.sql(
        "SELECT (SELECT count(*) FROM rft.experience WHERE reward IN ('NaN', 'Infinity', '-Infinity')) AS infinite,"
        " (SELECT count(*) FROM rft.annotation WHERE num IN ('NaN', 'Infinity', '-Infinity')) AS numbers"
    ).to_pylist()
    assert rows == [{"infinite": 0, "numbers": 0}]


def test_a_reason_of_ten_megabytes_is_refused_and_changes_nothing(
    owner: httpx.Client, studio_buffer: rftdata.Buffer
) -> None:
    before = studio_buffer.sql(STATE).to_pylist()
    for path in ("/review/answer", "/experience/1/reward", "/label/helpful/answer", "/experiences/relabel", "/sql"):
        for size, statuses in ((10 * 2**20, (413,)), (900_000, (413, 422))):
            fields = {"item": "1", "choice": "pass", "reward": "0.125", "value": "true", "where": "true", "digest": "x"}
            fields |= {"query": "x" * size, "key": f"k{size}", "reason": "x" * size}
            answer = owner.post(path, data=fields, headers={"Accept": "application/json"})
            assert answer.status_code in statuses, (path, size, answer.text[:200])
            assert "1 MB" in answer.text or answer.json()["problem"]
    assert studio_buffer.sql(STATE).to_pylist() == before


def test_a_kind_that_changes_while_people_label_takes_no_old_answer(
    site: Site, ada: str, studio_buffer: rftdata.Buffer
) -> None:
    define_kinds(studio_buffer, [LabelKind("changing", "choice", spec={"choices": ["a", "b"]})], author="olga")
    with site.account(ada) as client:
        old = {"item": "1", "value": "a", "version": "1", "key": "one"}
        define_kinds(studio_buffer, [LabelKind("changing", "choice", spec={"choices": ["b", "c"]})], author="olga")
        for fields in (old, {**old, "value": "b", "key": "two"}, {**old, "version": "3", "key": "three"}):
            told = client.post("/label/changing/answer", data=fields, headers={"Accept": "application/json"})
            assert 400 <= told.status_code < 500 and told.json()["problem"], told.text
        assert client.post("/label/changing/answer", data={**old, "version": "2", "value": "b"}).status_code == 200
        retire_kind(studio_buffer, "changing")
        told = client.post("/label/changing/answer", data={**old, "version": "2", "value": "c", "key": "four"})
        assert told.status_code == 404
    assert [row["value"] for row in standing(studio_buffer, kind="changing")] == ["b"]


def test_the_open_item_and_the_answers_of_another_person_stay_theirs(
    site: Site, ada: str, bob: str, studio_buffer: rftdata.Buffer
) -> None:
    studio_buffer.sql("INSERT INTO rft.question (kind, target_id, wanted) VALUES ('asked', 4, 1)")
    with site.account(ada) as first, site.account(bob) as second:
        claimed = first.post("/label/asked/claim", data={"count": "5"}).text
        question = claimed.partition('data-question="')[2].partition('"')[0]
        assert question and 'data-question="' not in second.post("/label/asked/claim", data={"count": "5"}).text
        # Naming it does not hand it over, and another person cannot move it.
        assert 'data-question="' not in second.post("/label/asked/claim", data={"count": "5", "holding": question}).text
        assert second.post("/label/asked/skip", data={"question": question}).json()["is_moved"] is False
        stored = first.post(
            "/label/asked/answer", data={"item": "4", "value": "true", "version": "1", "key": "x"}
        ).json()
        refused = second.post("/label/asked/undo", data={"label_batch_id": stored["label_batch_id"]})
        assert 400 <= refused.status_code < 500
        # The same key of another account is no repetition of the first person's answer.
        second.post("/label/asked/answer", data={"item": "4", "value": "false", "version": "1", "key": "x"})
        answered = first.post("/review/answer", data={"item": "5", "choice": "pass", "reward": "0.75"}).json()
        second.post("/review/undo", data={"item": "5", "label_batch_id": answered["label_batch_id"]})
    rows = {row["session_user_name"]: row["value"] for row in standing(studio_buffer, kind="asked", target_id=4)}
    assert rows == {ada: True, bob: False}
    labels = studio_buffer.sql("SELECT reward FROM rft.experience WHERE experience_id = 5")["reward"].to_pylist()
    assert labels == [0.75]
    assert studio_buffer.sql("SELECT answer FROM rft.review WHERE review_id = 5")["answer"].to_pylist() == ["pass"]


@pytest.mark.parametrize(
    ("experience", "name"),
    enumerate(['<b>eve</b>" onload="x', "o'; DROP TABLE rft.label; --", "x\u202ey", "a@b:c/d?e#f", "%s{0}"], start=11),
)
def test_hostile_names_of_people_are_texts(
    site: Site, studio_buffer: rftdata.Buffer, experience: int, name: str
) -> None:
    with account(studio_buffer, name, "rft_labeler"), site.account(name) as client:
        fields = {"item": str(experience), "value": "true", "version": "1", "reason": name}
        assert client.post("/label/helpful/answer", data=fields).status_code == 200
        changed = client.post(f"/experience/{experience}/reward", data={"reward": "0.125", "reason": name})
        assert changed.status_code == 200, changed.text
        for path in (f"/experience/{experience}", "/quality", "/label/helpful", "/review", "/experiences"):
            page = client.get(path)
            assert page.status_code == 200 and "<b>eve" not in page.text and 'onload="x' not in page.text
            assert "\u202e" not in page.text
        rows = standing(studio_buffer, kind="helpful", target_id=experience)
        assert [row["session_user_name"] for row in rows] == [name]
        with site.stranger(**FROM_HERE) as wrong:
            told = wrong.post("/sign-in", data={"account": name, "password": PASSWORD + "x"})
            assert told.status_code == 401 and "<b>eve" not in told.text and "\u202e" not in told.text


PATHS = (
    b"/sign-in/../review",
    b"/sign-in/%2e%2e/review",
    b"/sign-in%2f..%2freview",
    b"/static/../review",
    b"/static/%2e%2e/%2e%2e/pages/sql.py",
    b"/static/..\\..\\app.py",
    b"//review",
    b"/./review",
    b"/review;/sign-in",
    b"/REVIEW",
    b"/review%00",
    b"/review?token=x",
    b"/?token=",
    b"/?token=x&token=y",
    b"http://127.0.0.1/review",
    b"http://evil.example.org/review",
    b"*",
)


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_no_spelling_of_a_path_passes_without_a_session(site: Site, path: bytes) -> None:
    for method in (b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"POST", b"PUT", b"DELETE"):
        head = b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nX-HTTP-Method-Override: GET\r\n\r\n"
        answer = raw_answer(site, method + b" " + path + head)
        status = int(answer.split(b" ", 2)[1])
        assert status in (303, 400, 401, 403, 404, 405), answer[:300]
        assert not re.search(rb'data-token="[^"]', answer) and b"import " not in answer


def test_forged_origins_are_refused_for_every_write(owner: httpx.Client, studio_buffer: rftdata.Buffer) -> None:
    before = studio_buffer.sql(STATE).to_pylist()
    for route in routes():
        if "POST" in (route.methods or ()):
            path = route.path.format(**{each.name: "1" for each in route.dependant.path_params})
            for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"X-Studio-Token": "x"}):
                assert owner.post(path, data={"reward": "1"}, headers=headers).status_code == 403
    assert studio_buffer.sql(STATE).to_pylist() == before


def test_a_name_with_braces_is_refused_in_words(studio_buffer: rftdata.Buffer) -> None:
    # A studio of its own: at the other one this address has had its attempts.
    with (
        account(studio_buffer, "x{0}{b}", None),
        open_site(studio_buffer) as site,
        site.stranger(**FROM_HERE) as client,
    ):
        told = client.post("/sign-in", data={"account": "x{0}{b}", "password": PASSWORD})
        assert told.status_code == 401 and "the account x{0}{b} may not read the buffer" in told.text
