"""Every page, in both languages, on a desk and on a telephone: axe finds nothing, nothing overflows, and a keyboard reaches everything.

Pages are found by their routes (`all_pages`), so a new page is here without being named. One browser serves all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

import rftdata
from rftcore.studio.pages import all_pages
from rftcore.studio.translations import COOKIE, LANGUAGES
from rftdata.annotations import Annotation, annotate, define_kinds
from tests.support.browsers import violations
from tests.support.stored_run import StoredRun
from tests.support.studio_run import HOSTILE, KINDS
from tests.support.studio_site import Site

SIZES = ((1200, 800), (360, 740))
# Everything that a mouse can use, except what is not shown. Of radio buttons with one name, one is in the order of keys.
_USABLE = """() => {
  window.reached = new Set();
  document.addEventListener("focusin", (event) => window.reached.add(event.target));
  document.activeElement?.blur();
  const all = document.querySelectorAll("a[href], button, input, select, textarea, summary, [data-key], [hx-get], [hx-post]");
  window.usable = [...all].filter((each) => each.checkVisibility({visibilityProperty: true}) && !each.closest("[inert], .u-over") && !each.disabled
    && each.type !== "hidden" && !each.matches("input[type=radio]:not(:checked), form, [hx-trigger]:not(button):not(a):not(input):not(select)"));
  return window.usable.length;
}"""
_UNREACHED = "() => window.usable.filter((each) => each.isConnected && !window.reached.has(each)).map((each) => each.outerHTML.slice(0, 200))"


@pytest.fixture(scope="module")
def values(studio_buffer: rftdata.Buffer) -> dict[str, list[object]]:
    """Fill the pages; return what stands for the parameters of their addresses."""
    define_kinds(studio_buffer, KINDS, author="olga")
    stored = StoredRun(studio_buffer, "curves", steps=40)
    stored.attempt()
    for step in range(1, 12):
        stored.group(step - 1, [step / 100, 1.0])
        stored.train_step(step, loss=1.0 / step)
    stored.evaluation(0, {1: 0.0, 2: 0.5})
    stored.checkpoint(10)
    stored.worker("trainer", state="training", progress={"policy_step": 11})
    for author, value in (("ada", True), ("bob", False)):
        annotate(studio_buffer, [Annotation("helpful", 1, value, reason="<b>because</b>")], author=author)
    annotate(studio_buffer, [Annotation("faults", 1, list(HOSTILE[:4]), reason=HOSTILE[1])], author=HOSTILE[0])
    studio_buffer.sql(
        "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept, stage, reason)"
        " SELECT experience_id, group_id, 'v1', reward > 0, CASE WHEN reward > 0 THEN NULL ELSE 'drop_low' END, 'too low' FROM rft.experience WHERE run_id = 1"
    )
    studio_buffer.sql("INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (1, 2, 'ada')")
    studio_buffer.sql(
        "INSERT INTO rft.saved_query (kind, name, query, author) VALUES ('query', '<i>count</i>', 'SELECT 1', 'ada')"
    )
    newest = studio_buffer.sql("SELECT max(experience_id) AS n FROM rft.experience WHERE run_id = 1")["n"][0].as_py()
    places = "SELECT rollout_id, group_id FROM rft.experience WHERE experience_id = %s"
    hostile = studio_buffer.sql(places, [newest]).to_pylist()[0]
    return {
        "experience_id": [1, newest],
        "rollout_id": [hostile["rollout_id"]],
        "group_id": [1, hostile["group_id"]],
        "run_id": [1, stored.run_id],
        "task_id": [1],
        "target_id": [1],
        "target": ["experience", "task"],
        "step": [5],
        "kind": [kind.kind for kind in KINDS],
    }


def filled(path: str, values: dict[str, list[object]]) -> Iterator[str]:
    """Yield the addresses of a route; none if a value of its parameters is not known."""
    name = path.partition("{")[2].partition("}")[0]
    if not name:
        yield path
    for value in values.get(name, []) if name else []:
        yield from filled(path.replace(f"{{{name}}}", str(value)), values)


@pytest.fixture(scope="module")
def addresses(site: Site, values: dict[str, list[object]]) -> list[str]:
    """Addresses of all whole pages, with those of a person who is not signed in, and of one that failed."""
    routes = [route for _, router in all_pages() for route in router.routes if isinstance(route, APIRoute)]
    # Disagreements look alike for all kinds; queues do not.
    few = values | {"kind": ["helpful"]}
    paths = [
        path
        for route in routes
        if "GET" in (route.methods or ())
        for path in filled(route.path, values if route.path == "/label/{kind}" else few)
    ]
    paths += ["/experiences?where=reward+%3E+0", "/experiences?where=nonsense", "/sql?saved=1", "/pipeline?run=1"]
    paths += ["/runs/compare?run=1&run=2", "/nothing", "/experience/999999", "/tasks?name=%3Cb%3E", "/sign-in"]

    def is_page(client: httpx.Client, path: str) -> bool:
        return client.get(path).text.lstrip().lower().startswith("<!doctype")

    with site.owner() as client:
        found = [path for path in paths if is_page(client, path)]
    titles = {page.path for page, _ in all_pages() if page.order is not None}
    assert titles - set(found) == set()
    return found


def go(tab: Any, address: str) -> None:
    """Open a page, and wait for the first item of a queue."""
    tab.emulate_media(reduced_motion="reduce")  # colours are judged while nothing fades in
    tab.goto(address)
    if tab.locator("#queue").count():
        tab.locator("#queue article, #queue-empty:not([hidden])").first.wait_for()


def fits(tab: Any) -> bool:
    """Return whether nothing overflows once charts are drawn for a new size, which takes a moment."""
    for _ in range(50):
        if tab.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            return True
        tab.wait_for_timeout(100)
    return False


@pytest.mark.parametrize("language", LANGUAGES)
def test_axe_finds_nothing_and_nothing_overflows(tab: Any, site: Site, addresses: list[str], language: str) -> None:
    tab.context.add_cookies([{"name": COOKIE, "value": language, "url": site.origin}])
    found = []
    for path in addresses:
        go(tab, site.origin + path)
        assert tab.locator("html").get_attribute("lang") == language
        # Nothing of the texts of models, tools, tags and names is an element, or runs.
        foreign = tab.locator("#content img, #content script, [hx-get='/sign-out'], [onmouseover]").count()
        assert (path, foreign) == (path, 0)
        assert "owned" not in tab.title() and "\u202e" not in tab.content()
        for width, height in SIZES:
            tab.set_viewport_size({"width": width, "height": height})
            if not fits(tab):
                found.append((path, width, "overflows"))
            found += [(path, width, each) for each in violations(tab)]
    tab.context.clear_cookies(name=COOKIE)
    assert found == []


def test_a_keyboard_reaches_everything(tab: Any, site: Site, addresses: list[str]) -> None:
    tab.set_viewport_size({"width": 1200, "height": 800})
    missed = []
    for path in addresses:
        go(tab, site.origin + path)
        presses = tab.evaluate(_USABLE) + 10
        for _ in range(4):  # parts that arrive later come in between
            for _ in range(presses):
                tab.keyboard.press("Tab")
            if not tab.evaluate(_UNREACHED):
                break
        missed += [(path, each) for each in tab.evaluate(_UNREACHED)]
    assert missed == []
