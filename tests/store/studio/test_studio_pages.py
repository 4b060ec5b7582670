"""All pages in a real browser: hostile texts do nothing, the policy is kept, no accessibility violation, usable on a telephone."""

from __future__ import annotations

from typing import Any

import pytest

import rftdata
from tests.support.browsers import violations
from tests.support.studio_run import HOSTILE
from tests.support.studio_site import Site
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def ids(studio_buffer: rftdata.Buffer) -> dict[str, int]:
    """The experience, rollout and group whose texts attack the page, and those with a tool."""
    query = (
        "SELECT e.experience_id, e.rollout_id, e.group_id, t.task_key FROM rft.experience e JOIN rft.rollout_group g USING (group_id)"
        " JOIN rft.task t USING (task_id) WHERE t.task_key LIKE '<i>%' OR t.task_key = 'product' ORDER BY e.experience_id DESC"
    )
    found = {}
    for row in studio_buffer.sql(query).to_pylist():
        kind = "tool" if row["task_key"] == "product" else "hostile"
        found |= {f"{kind} {name}": row[f"{name}_id"] for name in ("experience", "rollout", "group")}
    return found


def paths(ids: dict[str, int]) -> list[str]:
    hostile = [f"/{name}/{ids[f'hostile {name}']}" for name in ("experience", "rollout", "group")]
    return [
        *hostile,
        f"{hostile[2]}?base={ids['hostile experience']}",
        f"/experience/{ids['tool experience']}",
        "/review",
    ]


def test_every_page_keeps_the_policy_is_accessible_and_fits_a_telephone(
    tab: Any, site: Site, ids: dict[str, int]
) -> None:
    for path in paths(ids):
        tab.set_viewport_size({"width": 1200, "height": 800})
        tab.goto(site.origin + path)
        assert tab.locator("h1").first.inner_text()
        assert (path, violations(tab)) == (path, [])
        assert tab.locator("#content img, #content script, #content [hx-get='/sign-out']").count() == 0
        assert "\u202e" not in tab.content() and "\u2066" not in tab.content()
        tab.set_viewport_size({"width": 360, "height": 740})
        assert (path, tab.evaluate("document.documentElement.scrollWidth <= innerWidth")) == (path, True)
        assert tab.title().endswith("Studio") and "owned" not in tab.title()


def test_hostile_texts_are_shown_as_they_are(tab: Any, site: Site, ids: dict[str, int]) -> None:
    tab.goto(f"{site.origin}/experience/{ids['hostile experience']}")
    shown = "\n".join(tab.locator(".model-text").all_text_contents())
    for text in HOSTILE:
        assert text.isprintable() <= (text in shown)
    assert tab.locator(".control").first.inner_text() == "\\u202e"


def test_thinking_is_folded_and_tools_have_names(tab: Any, site: Site, ids: dict[str, int]) -> None:
    tab.goto(f"{site.origin}/experience/{ids['tool experience']}")
    thought = tab.get_by_text("I should multiply")
    assert not thought.is_visible()
    tab.locator("summary", has_text="Thinking").click()
    assert thought.is_visible()
    assert tab.locator(".call .part-head b").inner_text() == "calculate"
    assert tab.locator(".result .model-text").inner_text() == "408"


def test_tokens_are_coloured_by_their_probability(tab: Any, site: Site, ids: dict[str, int]) -> None:
    tab.goto(f"{site.origin}/experience/{ids['tool experience']}")
    tab.keyboard.press("t")
    tab.locator(".heat span").first.wait_for()
    classes = tab.evaluate("[...document.querySelectorAll('.heat span')].map((each) => each.classList[0])")
    assert {"heat-0", "heat-3", "heat-4"} <= set(classes)
    assert violations(tab) == []


def test_a_reward_is_corrected_and_undone_with_its_history(
    tab: Any, site: Site, ids: dict[str, int], studio_buffer: rftdata.Buffer
) -> None:
    experience = ids["tool experience"]
    tab.goto(f"{site.origin}/experience/{experience}")
    tab.keyboard.press("0")
    tab.locator(".history li", has_text="1 → 0").wait_for()
    tab.wait_for_load_state()  # keys work once the scripts of the new page run
    tab.keyboard.press("u")
    tab.locator(".history li", has_text="0 → 1").wait_for()
    rewards = studio_buffer.sql("SELECT reward FROM rft.experience WHERE experience_id = %s", [experience])
    assert rewards["reward"].to_pylist() == [1.0]


def test_a_reward_that_another_person_set_since_is_not_overwritten(
    tab: Any, site: Site, bob: str, ids: dict[str, int], studio_buffer: rftdata.Buffer
) -> None:
    experience = ids["hostile experience"]
    tab.goto(f"{site.origin}/experience/{experience}")
    with site.account(bob) as client:
        assert client.post(f"/experience/{experience}/reward", data={"reward": "0.75"}).status_code == 200
    before = tab.locator("#problems").inner_text()
    tab.locator("button[name=reward][value='1']").click()
    wait_until(lambda: tab.locator("#problems").inner_text() != before)
    assert "studio_bob has set its reward to 0.75 since" in tab.locator("#problems").inner_text()
    rewards = studio_buffer.sql("SELECT reward FROM rft.experience WHERE experience_id = %s", [experience])
    assert rewards["reward"].to_pylist() == [0.75]


def test_what_does_not_exist_is_told(site: Site) -> None:
    with site.owner() as client:
        for path in ("/experience/999999", "/rollout/999999", "/group/999999", "/nothing"):
            answer = client.get(path)
            assert answer.status_code == 404 and "no such" in answer.text
        assert client.get("/experience/x").status_code in (404, 422)
        assert client.get(f"/experience/{10**30}").status_code in (404, 422)


def test_a_label_of_bad_values_is_refused_and_changes_nothing(site: Site, studio_buffer: rftdata.Buffer) -> None:
    before = studio_buffer.sql("SELECT count(*) AS n FROM rft.label")["n"].to_pylist()
    wrong = [
        {"reward": "nan"},
        {"reward": "inf"},
        {"reward": "x"},
        {"reward": "1", "turn": "7"},
    ]
    with site.owner() as client:
        for data in wrong:
            answer = client.post("/experience/1/reward", data=data, headers={"Accept": "application/json"})
            assert (data, answer.status_code) == (data, 422) and answer.json()["problem"]
        assert client.post("/experience/999999/reward", data={"reward": "1"}).status_code == 422
    assert studio_buffer.sql("SELECT count(*) AS n FROM rft.label")["n"].to_pylist() == before


def test_a_form_of_another_site_changes_nothing(signed_in: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    """Chromium sends the form, without the cookie; and with the cookie of the same machine, from another port, it names that site."""
    before = studio_buffer.sql("SELECT count(*) AS n FROM rft.label")["n"].to_pylist()
    form = f"<form method=post action='{site.origin}/experience/1/reward'><input name=reward value=0.125></form>"
    page = signed_in.new_page()
    page.route("http://localhost:1/*", lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto("http://localhost:1/evil")
    with page.expect_response(f"{site.origin}/experience/1/reward") as answer:
        page.evaluate("document.forms[0].submit()")
    assert answer.value.status == 403
    page.close()
    assert studio_buffer.sql("SELECT count(*) AS n FROM rft.label")["n"].to_pylist() == before
