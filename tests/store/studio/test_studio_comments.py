"""Comments on the pages: written without a mouse, shown as texts, and hidden while a blind question is open."""

from __future__ import annotations

from typing import Any

import pytest

import rftdata
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from rftdata.annotations.comments import comments
from tests.support.browsers import violations
from tests.support.studio_run import HOSTILE
from tests.support.studio_site import Site


@pytest.fixture(autouse=True, scope="module")
def _kinds(studio_buffer: rftdata.Buffer) -> None:
    kinds = [LabelKind("helpful", "bool"), LabelKind("fair", "bool", target="group", blind=True)]
    define_kinds(studio_buffer, kinds, author="olga")


def test_a_comment_is_written_on_the_page_and_shown_as_a_text(
    tab: Any, site: Site, ada: str, studio_buffer: rftdata.Buffer
) -> None:
    tab.goto(f"{site.origin}/experience/1")
    tab.keyboard.press("m")
    tab.keyboard.type(HOSTILE[0])
    tab.get_by_role("button", name="Comment").click()
    tab.locator("#comments .instruction", has_text="<img").wait_for()
    assert tab.locator("#comments img").count() == 0 and violations(tab) == []
    assert [(each.comment, each.session_user_name) for each in comments(studio_buffer, "experience", 1)] == [
        (HOSTILE[0], ada)
    ]
    # What is typed stays while the thread changes.
    tab.locator("#comments textarea").fill("half a sen")
    with site.owner() as olga:
        assert olga.post("/comments/experience/1", data={"comment": "An answer", "key": "k"}).status_code == 200
    tab.locator("#comments .instruction", has_text="An answer").wait_for()
    assert tab.locator("#comments textarea").input_value() == "half a sen"


def test_the_queue_leads_to_the_thread_of_its_item(tab: Any, site: Site) -> None:
    tab.goto(f"{site.origin}/label/helpful")
    item = tab.locator("#queue article").get_attribute("data-item-id")
    tab.keyboard.press("m")
    tab.wait_for_url(f"{site.origin}/comments/experience/{item}?kind=helpful")
    tab.keyboard.press("m")
    tab.keyboard.type("Which unit is meant?")
    tab.get_by_role("button", name="Comment").click()
    tab.locator("#comments .history", has_text="helpful").wait_for()
    assert violations(tab) == []
    tab.set_viewport_size({"width": 360, "height": 740})
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.goto(f"{site.origin}/label/helpful")
    assert tab.locator(f"#queue article[data-item-id='{item}'] a[data-key='m']").inner_text().split()[-1].isdigit()


def test_comments_of_others_appear_after_ones_own_blind_answer(
    site: Site, ada: str, bob: str, studio_buffer: rftdata.Buffer
) -> None:
    found = studio_buffer.sql("SELECT group_id, experience_id FROM rft.experience ORDER BY 1, 2 LIMIT 1").to_pylist()[0]
    group = found["group_id"]
    annotate(studio_buffer, [Annotation("fair", group, False)], author="olga")
    with site.owner() as olga, site.account(bob) as client:
        for target, key in (("group", group), ("experience", found["experience_id"])):
            assert olga.post(f"/comments/{target}/{key}", data={"comment": "Not fair at all"}).status_code == 200
            assert "Not fair" not in client.get(f"/comments/{target}/{key}/thread").text
        answer = {"item": str(group), "value": "true", "key": "own"}
        assert client.post("/label/fair/answer", data=answer).status_code == 200
        for target, key in (("group", group), ("experience", found["experience_id"])):
            assert "Not fair at all" in client.get(f"/comments/{target}/{key}/thread").text
        assert client.post("/comments/group/999999", data={"comment": "x"}).status_code == 422
        assert client.get("/comments/run/1").status_code == 422
