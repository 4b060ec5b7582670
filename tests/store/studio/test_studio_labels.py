"""Labels of every kind through the pages, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

import rftdata
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds, questions, standing
from tests.support.browsers import violations
from tests.support.studio_run import KINDS
from tests.support.studio_site import Site
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True, scope="module")
def _kinds(studio_buffer: rftdata.Buffer) -> None:
    define_kinds(studio_buffer, KINDS, author="olga")


def opened(tab: Any, site: Site, kind: str) -> int:
    """Open the queue of a kind; return the first target."""
    tab.goto(f"{site.origin}/label/{kind}")
    tab.wait_for_selector("article.item")
    return shown(tab)


def shown(tab: Any) -> int:
    return int(tab.locator("#queue article").get_attribute("data-item-id"))


def stored(tab: Any, buffer: rftdata.Buffer, kind: str, target: int) -> Any:
    """Wait until the page has sent everything; return the value that stands."""
    tab.locator(f"#queue article:not([data-item-id='{target}'])").wait_for()
    wait_until(
        lambda: tab.evaluate(
            "Object.entries(sessionStorage).every(([key, text]) => !key.startsWith('rft-studio-writes') || text === '[]')"
        )
    )
    rows = standing(buffer, kind=kind, target_id=target)
    assert len(rows) == 1 and rows[0]["session_user_name"] == "studio_ada" and rows[0]["seconds"] >= 0
    return rows[0]["value"]


def test_yes_and_choices_take_one_key(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "helpful")
    tab.keyboard.press("1")
    assert stored(tab, studio_buffer, "helpful", target) is True
    target = opened(tab, site, "tone")
    tab.keyboard.press("2")
    assert stored(tab, studio_buffer, "tone", target) == "neutral"
    target = opened(tab, site, "quality")
    tab.keyboard.press("4")
    assert stored(tab, studio_buffer, "quality", target) == 4


def test_the_page_claims_the_questions_that_people_are_asked(
    tab: Any, site: Site, studio_buffer: rftdata.Buffer
) -> None:
    questions.ask(studio_buffer, "asked", [9, 4], author="olga")
    tab.goto(f"{site.origin}/label/asked")
    for target in (9, 4):
        tab.locator(f"#queue article[data-item-id='{target}'][data-question]").wait_for()
        tab.keyboard.press("1")
    tab.locator("#queue-empty").wait_for()
    wait_until(lambda: len(standing(studio_buffer, kind="asked")) == 2)


def test_an_answer_is_undone_and_the_item_comes_back(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "helpful")
    tab.keyboard.press("0")
    assert stored(tab, studio_buffer, "helpful", target) is False
    tab.keyboard.press("u")
    tab.locator(f"#queue article[data-item-id='{target}']").wait_for()
    assert standing(studio_buffer, kind="helpful", target_id=target) == []
    tab.keyboard.press("U")
    assert stored(tab, studio_buffer, "helpful", target) is False


def test_forms_are_filled_without_a_mouse(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "faults")
    for key in ("1", "v"):
        tab.keyboard.press(key)
    tab.keyboard.type("no unit, late")
    tab.keyboard.press("Enter")
    assert stored(tab, studio_buffer, "faults", target) == ["wrong sum", "no unit", "late"]
    target = opened(tab, site, "rubric")
    for key in ("v", "2", "Tab", "3", "Enter"):
        tab.keyboard.press(key)
    assert stored(tab, studio_buffer, "rubric", target) == {"clarity": 2, "correctness": 3}
    target = opened(tab, site, "critique")
    tab.keyboard.press("v")
    tab.keyboard.type("It does not say why.")
    tab.keyboard.press("Escape")
    tab.keyboard.press("Enter")
    assert stored(tab, studio_buffer, "critique", target) == "It does not say why."
    target = opened(tab, site, "steps")
    for key in ("v", "-", "1", "Enter"):
        tab.keyboard.press(key)
    assert stored(tab, studio_buffer, "steps", target) == [{"turn": 0, "value": -1}]


def test_an_edited_response_keeps_its_exact_text(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "better")
    field = tab.locator("#queue textarea")
    before = studio_buffer.sql("SELECT response FROM rft.experience WHERE experience_id = %s", [target])["response"]
    assert field.input_value() == before.to_pylist()[0]
    field.fill("  two\n\tlines <b>\u202e")
    tab.get_by_role("button", name="Store").click()
    assert stored(tab, studio_buffer, "better", target) == {"response": "  two\n\tlines <b>\u202e"}


def test_a_ranking_has_ties_hides_its_sources_and_records_what_was_shown(
    tab: Any, site: Site, studio_buffer: rftdata.Buffer
) -> None:
    target = opened(tab, site, "best")
    order = json.loads(tab.locator("#queue article").get_attribute("data-shown"))
    assert len(order) == 3 and "reward" not in tab.locator("#queue").inner_text()
    for key in ("b", "a", "=", "c"):
        tab.keyboard.press(key)
    assert tab.locator(".order").inner_text() == "B > A = C"
    tab.keyboard.press("Enter")
    assert stored(tab, studio_buffer, "best", target) == {"order": [[order[1]], [order[0], order[2]]]}
    assert standing(studio_buffer, kind="best", target_id=target)[0]["shown"]["order"] == order


def test_of_two_answers_one_key_and_enter_suffice(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "best")
    while tab.locator("[data-letter]").count() != 2:
        tab.keyboard.press("s")
        tab.locator(f"#queue article:not([data-item-id='{target}'])").wait_for()
        target = shown(tab)
    order = json.loads(tab.locator("#queue article").get_attribute("data-shown"))
    tab.keyboard.press("e")
    assert tab.locator(".order").inner_text() == "A = B"
    tab.keyboard.press("b")
    tab.keyboard.press("Enter")
    assert stored(tab, studio_buffer, "best", target) == {"order": [[order[1]], [order[0]]]}


def test_two_people_see_rankings_in_orders_of_their_own(site: Site, ada: str, bob: str) -> None:
    orders = []
    for name in (ada, bob):
        with site.account(name) as client:
            text = client.get("/label/best/items?count=10").text
            assert text == client.get("/label/best/items?count=10").text
            orders.append(text.split('data-shown="')[1:])
    assert [each[:20] for each in orders[0]] != [each[:20] for each in orders[1]]


def test_parts_are_marked_with_the_arrow_keys(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "errors")
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "1"):
        tab.keyboard.press(key)
    tab.keyboard.press("Enter")
    expected = [{"start": 2, "end": 4, "unit": "token", "label": "wrong"}]
    assert stored(tab, studio_buffer, "errors", target) == expected


def test_a_models_answer_is_a_suggestion(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    target = opened(tab, site, "tone")
    suggestion = Annotation("tone", target, "rude", model="judge-1", reason="It shouts.")
    said = annotate(studio_buffer, [suggestion], author="judge", source="judge").annotation_ids
    opened(tab, site, "tone")
    assert "A model suggests: rude (judge-1)" in tab.locator("#queue .notice").inner_text()
    tab.keyboard.press("1")
    wait_until(lambda: len(standing(studio_buffer, kind="tone", target_id=target)) == 2)
    own = next(row for row in standing(studio_buffer, kind="tone", target_id=target) if row["source"] == "human")
    assert own["value"] == "friendly" and own["shown"]["suggestion"] == '"rude"'
    assert own["shown"]["suggestion_id"] == said[0]


def test_a_repeated_request_stores_nothing(site: Site, ada: str, studio_buffer: rftdata.Buffer) -> None:
    fields = {"item": "5", "value": "true", "key": "one", "seconds": "1.5"}
    with site.account(ada) as client:
        first, second = (client.post("/label/helpful/answer", data=fields).json() for _ in range(2))
    assert first["label_batch_id"] == second["label_batch_id"] and second["is_repeated"]
    assert len([row for row in standing(studio_buffer, kind="helpful") if row["target_id"] == 5]) == 1


def test_a_kind_that_changed_meanwhile_is_told(site: Site, ada: str, studio_buffer: rftdata.Buffer) -> None:
    define_kinds(studio_buffer, [LabelKind("solvable", "bool", "task", instruction="By a child?")], author="olga")
    with site.account(ada) as client:
        fields = {"item": "1", "value": "true", "version": "1", "key": "old"}
        answer = client.post("/label/solvable/answer", data=fields, headers={"Accept": "application/json"})
    assert answer.status_code == 409 and "was changed" in answer.json()["problem"]
    assert standing(studio_buffer, kind="solvable") == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("helpful", {"item": "999999", "value": "true"}),
        ("helpful", {"item": "x", "value": "true"}),
        ("helpful", {"item": "7"}),
        ("quality", {"item": "7", "value": "9"}),
        ("quality", {"item": "7", "value": "nan"}),
        ("tone", {"item": "7", "value": "loud"}),
        ("best", {"item": "1", "order": '[["Z"]]', "shown": "[1, 2]"}),
        ("best", {"item": "1", "order": '[["A"], ["B"]]', "shown": "[1, 20]"}),
        ("best", {"item": "1", "order": "{", "shown": "["}),
        ("critique", {"item": "7", "value": "x" * 70_000}),
        ("helpful", {"item": "7", "value": "true", "seconds": "never"}),
    ],
)
def test_wrong_values_are_told_and_change_nothing(
    site: Site, ada: str, studio_buffer: rftdata.Buffer, kind: str, fields: dict[str, str]
) -> None:
    before = len(standing(studio_buffer, kind=kind))
    with site.account(ada) as client:
        answer = client.post(f"/label/{kind}/answer", data=fields, headers={"Accept": "application/json"})
    assert answer.status_code == 422 and answer.json()["problem"]
    assert len(standing(studio_buffer, kind=kind)) == before


def test_the_pages_are_accessible_and_fit_a_telephone(tab: Any, site: Site) -> None:
    for kind in ("", "/best", "/errors", "/faults"):
        tab.set_viewport_size({"width": 1200, "height": 800})
        tab.goto(f"{site.origin}/label{kind}")
        tab.wait_for_selector("article.item" if kind else "section.card")
        assert (kind, violations(tab)) == (kind, [])
        tab.set_viewport_size({"width": 360, "height": 740})
        assert (kind, tab.evaluate("document.documentElement.scrollWidth <= innerWidth")) == (kind, True)
