"""The review queue as a labeller sees it, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import rftdata
from tests.support import studio_run
from tests.support.browsers import PATIENCE_MS, violations
from tests.support.ports import closed_port
from tests.support.studio_site import PASSWORD, Site, open_site
from tests.support.waiting import wait_until


def end_leases(buffer: rftdata.Buffer) -> None:
    """Give all questions back that pages of earlier tests hold or have skipped."""
    buffer.sql("DELETE FROM rft.assignment WHERE state <> 'answered'")


@pytest.fixture
def page(tab: Any, site: Site, studio_buffer: rftdata.Buffer) -> Any:
    """The queue in a new tab."""
    end_leases(studio_buffer)
    tab.goto(f"{site.origin}/review")
    tab.wait_for_selector("article.item")
    return tab


def shown(page: Any) -> int:
    return int(page.locator("#queue article").get_attribute("data-experience-id"))


def press(page: Any, key: str) -> None:
    """Press a key, and wait until another item is shown."""
    before = page.locator("#queue article").get_attribute("data-item-id")
    page.keyboard.press(key)
    page.locator(f"#queue article:not([data-item-id='{before}'])").wait_for()


def settled(page: Any) -> None:
    """Wait until nothing waits to be sent."""
    wait_until(
        lambda: page.evaluate(
            "Object.entries(sessionStorage).every(([key, text]) => !key.startsWith('rft-studio-writes') || text === '[]')"
        )
    )


def state(buffer: rftdata.Buffer, experience: int) -> tuple[float, str | None]:
    query = "SELECT reward, answer::text AS answer FROM rft.review JOIN rft.experience USING (experience_id) WHERE experience_id = %s"
    (row,) = buffer.sql(query, [experience]).to_pylist()
    return row["reward"], row["answer"]


def test_one_key_answers_and_shows_the_next_item(page: Any, studio_buffer: rftdata.Buffer) -> None:
    first = shown(page)
    press(page, "0")
    second = shown(page)
    press(page, "d")
    third = shown(page)
    press(page, "Enter")
    settled(page)
    assert len({first, second, third}) == 3
    assert state(studio_buffer, first) == (0.0, "pass")
    assert state(studio_buffer, second)[1] == "drop"
    assert state(studio_buffer, third)[1] == "pass"


def test_keys_do_nothing_while_a_person_types(page: Any, studio_buffer: rftdata.Buffer) -> None:
    before = shown(page)
    page.keyboard.press("c")
    page.keyboard.type("10 dus?")
    assert shown(page) == before and page.locator("#reason").input_value() == "10 dus?"
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    page.keyboard.type("0,25")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "id => document.querySelector('#queue article')?.dataset.experienceId !== id", arg=str(before)
    )
    settled(page)
    assert state(studio_buffer, before) == (0.25, "pass")
    label = studio_buffer.sql("SELECT reason FROM rft.label WHERE experience_id = %s", [before]).to_pylist()
    assert label == [{"reason": "10 dus?"}]


def test_undo_and_redo_work_over_several_items(page: Any, studio_buffer: rftdata.Buffer) -> None:
    first = shown(page)
    before = state(studio_buffer, first)
    press(page, "0" if before[0] else "1")
    second = shown(page)
    press(page, "d")
    for experience in (second, first):
        press(page, "u")
        settled(page)
        assert shown(page) == experience
    assert state(studio_buffer, first) == before and state(studio_buffer, second)[1] is None
    press(page, "U")
    assert shown(page) == second
    press(page, "U")
    settled(page)
    assert state(studio_buffer, first)[1] == "pass" and state(studio_buffer, second)[1] == "drop"


def test_an_undo_finds_its_receipt_after_many_other_answers(page: Any, studio_buffer: rftdata.Buffer) -> None:
    first = shown(page)
    before = state(studio_buffer, first)
    press(page, "0" if before[0] else "1")
    settled(page)
    # The receipts of another page of this tab, more than a page can undo.
    page.evaluate(
        """() => {
            const key = Object.keys(sessionStorage).find((each) => each.startsWith("rft-studio-receipts"));
            const others = Array.from({length: 199}, (_, i) => [`other ${i}`, {label_batch_id: i}, "/label/helpful/answer"]);
            sessionStorage.setItem(key, JSON.stringify([...JSON.parse(sessionStorage.getItem(key)), ...others]));
        }"""
    )
    page.reload()
    page.wait_for_selector("article.item")
    sent = page.evaluate(
        """async () => {
            const script = document.querySelector("script[type=module]").src;
            const { write } = await import(script.replace(/studio\\.js.*/, "writes.js"));
            for (let i = 0; i < 5; i++) write("/language", {language: "en"});
        }"""
    )
    settled(page)
    with page.expect_request("**/review/undo") as undone:
        page.keyboard.press("u")
    assert sent is None and "label_batch_id=&" not in undone.value.post_data
    settled(page)
    assert state(studio_buffer, first) == before


def sign_in(page: Any, site: Site, name: str) -> None:
    page.goto(site.origin)
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("article.item")


def sign_out(page: Any) -> None:
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in*")


def newest_label(buffer: rftdata.Buffer) -> int:
    return int(buffer.sql("SELECT coalesce(max(label_id), 0) AS n FROM rft.label")["n"][0].as_py())


def accounts_since(buffer: rftdata.Buffer, newest: int) -> list[str]:
    """Return the account of the newest label of each experience that was labelled after a label."""
    query = "SELECT DISTINCT ON (experience_id) session_user_name AS account FROM rft.label WHERE label_id > %s ORDER BY experience_id, label_id"
    return [str(name) for name in buffer.sql(query, [newest])["account"].to_pylist()]


@pytest.fixture
def own_context(browser: Any) -> Iterator[Any]:
    """A browser without a session."""
    context = browser.new_context(locale="en")
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


def new_tab(context: Any) -> Any:
    page = context.new_page()
    page.on("dialog", lambda dialog: dialog.accept())
    return page


def test_what_waits_in_a_tab_is_sent_by_the_account_that_wrote_it_alone(
    own_context: Any, site: Site, studio_buffer: rftdata.Buffer, ada: str, bob: str
) -> None:
    newest = newest_label(studio_buffer)
    page = new_tab(own_context)
    sign_in(page, site, ada)
    own_context.route("**/review/answer", lambda route: route.abort())
    first = page.locator("article.item").get_attribute("data-item-id")
    page.keyboard.press("0")
    page.locator("#state", has_text="not stored yet: 1").wait_for()
    sign_out(page)
    own_context.unroute("**/review/answer")
    end_leases(studio_buffer)
    sign_in(page, site, bob)
    assert page.locator("article.item").get_attribute("data-item-id") == first, "it is open for bob"
    page.wait_for_timeout(500)
    assert accounts_since(studio_buffer, newest) == []
    sign_out(page)
    sign_in(page, site, ada)
    wait_until(lambda: accounts_since(studio_buffer, newest) == [ada])


def test_a_page_whose_account_was_replaced_in_another_tab_keeps_its_answer(
    own_context: Any, site: Site, studio_buffer: rftdata.Buffer, ada: str, bob: str
) -> None:
    newest = newest_label(studio_buffer)
    page, other = new_tab(own_context), new_tab(own_context)
    sign_in(page, site, ada)
    other.goto(f"{site.origin}/runs")
    sign_out(other)
    sign_in(other, site, bob)
    reward, _ = state(studio_buffer, shown(page))
    page.keyboard.press("0" if reward else "1")
    page.locator("#state", has_text="entered under another account").wait_for()
    page.reload()
    page.wait_for_selector("article.item")
    page.wait_for_timeout(500)
    assert accounts_since(studio_buffer, newest) == []
    sign_out(page)
    sign_in(page, site, ada)
    wait_until(lambda: accounts_since(studio_buffer, newest) == [ada])


def test_what_waits_in_a_tab_stays_with_its_buffer(
    own_context: Any, studio_buffer: rftdata.Buffer, buffer: rftdata.Buffer
) -> None:
    studio_run.ask(buffer, studio_run.store(buffer))
    with buffer.database.connection() as connection:
        connection.execute(
            "UPDATE rft.buffer SET buffer_id = gen_random_uuid()"
        )  # databases of tests are copies of one
    page = new_tab(own_context)
    with closed_port() as port:
        with open_site(studio_buffer, port=port) as first:
            page.goto(first.server.address())
            page.wait_for_selector("article.item")
            own_context.route("**/review/answer", lambda route: route.abort())
            page.keyboard.press("0")
            page.locator("#state", has_text="not stored yet: 1").wait_for()
        own_context.unroute("**/review/answer")
        with open_site(buffer, port=port) as second:
            page.goto(second.server.address())
            page.wait_for_selector("article.item")
            page.wait_for_timeout(500)
            assert page.locator("#state").inner_text() == ""
    rows = buffer.sql("SELECT review_id FROM rft.review WHERE answer IS NOT NULL")
    assert rows.num_rows == 0


def test_a_skipped_item_comes_again_at_the_end(page: Any, studio_buffer: rftdata.Buffer) -> None:
    first = shown(page)
    waiting = studio_buffer.sql("SELECT count(*) AS n FROM rft.v_review_queue")["n"].to_pylist()[0]
    for _ in range(waiting - 1):
        press(page, "s")
        assert shown(page) != first
    press(page, "s")
    assert shown(page) == first
    assert "skipped" in page.locator("#state").inner_text()


def test_the_keys_are_shown_beside_the_actions_and_under_the_question_mark(page: Any) -> None:
    assert page.get_by_role("button", name="Right").locator("kbd").inner_text() == "1"
    page.keyboard.press("?")
    rows = page.locator("#keys tr").all_inner_texts()
    assert [row for row in rows if row.startswith("u") and "Undo" in row]
    assert violations(page) == []
    page.keyboard.press("Escape")


def test_texts_of_models_do_nothing_on_the_page(page: Any) -> None:
    while "\\u202e" not in page.locator("#queue").inner_text():
        press(page, "s")
    assert page.title().startswith("Review")
    assert page.locator("#queue img, #queue script, #queue [hx-get]").count() == 0
    assert page.locator("#queue .control").count() > 0 and "\u202e" not in page.content()
    assert violations(page) == []


def test_it_is_usable_on_a_telephone_and_in_chinese(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="中文").click()
    page.get_by_role("heading", name="审阅").wait_for()
    page.wait_for_selector("article.item")
    assert violations(page) == []
    page.get_by_role("button", name="English").click()
    page.get_by_role("heading", name=re.compile("Review")).wait_for()
    page.wait_for_selector("article.item")


def held(client: Any, **fields: str) -> list[int]:
    """The reviews that a page of the client is given."""
    page = client.post("/review/claim", data={"count": "3", **fields}).text
    return [int(found) for found in re.findall(r'data-item-id="(\d+)"', page)]


def test_two_people_are_never_shown_the_same_question_at_once(
    page: Any, site: Site, bob: str, studio_buffer: rftdata.Buffer
) -> None:
    with site.account(bob) as other:
        first = int(page.locator("#queue article").get_attribute("data-item-id"))
        leased = (
            "SELECT review_id FROM rft.question JOIN rft.assignment USING (question_id)"
            " WHERE state = 'leased' AND leased_until > now() AND session_user_name = %s"
        )

        def of(account: str) -> set[int]:
            return set(studio_buffer.sql(leased, [account])["review_id"].to_pylist())

        taken = held(other)
        assert taken and not of("studio_ada") & set(taken) and first in of("studio_ada")
        # An answer that is taken back stays with its person.
        press(page, "0")
        settled(page)
        press(page, "u")
        settled(page)
        assert int(page.locator("#queue article").get_attribute("data-item-id")) == first
        assert first in of("studio_ada") and first not in held(other, count="10")
        # A lease ends by the clock; then the question goes to the next person, and the late answer of the first overwrites nothing.
        studio_buffer.sql("UPDATE rft.assignment SET leased_until = leased_until - interval '6 min'")
        assert first in held(other, count="10")
        (seen,) = re.findall(r'data-seen="(\d*)"', other.get(f"/review/item/{first}").text)
        dropped = {"item": str(first), "choice": "drop", "seen": seen}
        assert other.post("/review/answer", data=dropped).status_code == 200
        page.keyboard.press("Enter")
        page.locator("#problems", has_text="answered by studio_bob meanwhile").wait_for()


def test_a_skip_is_remembered_and_taken_back(page: Any, site: Site, studio_buffer: rftdata.Buffer) -> None:
    first = int(page.locator("#queue article").get_attribute("data-item-id"))
    skips = (
        "SELECT review_id FROM rft.question JOIN rft.assignment USING (question_id)"
        " WHERE state = 'skipped' AND session_user_name = 'studio_ada'"
    )
    before = set(studio_buffer.sql(skips)["review_id"].to_pylist())
    press(page, "s")
    settled(page)
    assert set(studio_buffer.sql(skips)["review_id"].to_pylist()) == before | {first}
    press(page, "u")
    settled(page)
    assert int(page.locator("#queue article").get_attribute("data-item-id")) == first
    assert first not in studio_buffer.sql(skips)["review_id"].to_pylist()
    # In another tab, too, and after a reload.
    press(page, "s")
    settled(page)
    page.reload()
    page.locator(".skipped summary").click()
    experience = studio_buffer.sql(f"SELECT experience_id AS e FROM rft.review WHERE review_id = {first}")["e"][
        0
    ].as_py()
    with page.expect_navigation():  # the page shows the new state
        page.get_by_role("button", name=f"Take back: Experience {experience}", exact=True).click()
    wait_until(lambda: first not in studio_buffer.sql(skips)["review_id"].to_pylist())
    assert violations(page) == []
