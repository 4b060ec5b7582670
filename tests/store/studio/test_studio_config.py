"""The page of configurations: a form and a text of one file, saved without losing anything, and runs started, stopped and resumed with it."""

from __future__ import annotations

import html
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rftdata
from rftcore.studio.run_processes import Process
from rftcore.studio.settings import StudioSettings
from rftdata.errors import ConfigError
from tests.support.browsers import PATIENCE_MS, REPORT_VIOLATIONS, is_error, violations
from tests.support.models import make_tiny_model
from tests.support.studio_run import HOSTILE
from tests.support.studio_site import Site, account, open_site
from tests.support.waiting import wait_until

CONFIG = """# The cheapest run: demonstrations, one layer.
run: {name: cheap, seed: 1}  # its name
model: {path: ./model}
tasks: [{name: t, source: "./tasks.py:questions"}]
algorithm: {name: sft, group_size: 1}
explorer: {engine: none, workflow: demonstration, max_refill: 0, claim_groups: 64}
trainer:
  batch_groups: 4   # few
  checkpoint_every: 2
  autocast: none
sync: {offset: 8}
sampling: {max_staleness: 100}
steps: 1000000
"""
TASKS = """
def questions():
    return ({"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(1000))
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("configs")
    (folder / "cheap.yaml").write_text(CONFIG)
    (folder / "tasks.py").write_text(TASKS)
    (folder / "hostile.yaml").write_text(f"# {HOSTILE[0]}\nrun: {{name: '{HOSTILE[2]}'}}\n{HOSTILE[1]}\n")
    make_tiny_model(folder / "model", num_layers=1)
    yield folder
    kill_runs(folder)


@pytest.fixture(scope="module")
def site(studio_buffer: rftdata.Buffer, configs: Path) -> Iterator[Site]:
    with open_site(studio_buffer, configs=configs) as opened:
        yield opened


@pytest.fixture
def owner(site: Site) -> Iterator[httpx.Client]:
    with site.owner() as client:
        yield client


@pytest.fixture
def file(configs: Path, request: pytest.FixtureRequest) -> str:
    """A copy of the configuration for one test."""
    name = f"{request.node.originalname.removeprefix('test_')[:20]}.yaml"
    (configs / name).write_text(CONFIG)
    return name


def kill_runs(configs: Path) -> None:
    for record in configs.glob(".rft-studio/start-*.json"):
        process = Process(**json.loads(record.read_text())["process"])
        if not process.has_ended:
            os.kill(process.pid, signal.SIGKILL)


def hidden(page: str, name: str) -> str:
    found = re.search(f'name="{name}" value="([^"]*)"', page)
    assert found is not None, page
    return html.unescape(found[1])


def state(client: httpx.Client, file: str, text: str | None = None) -> dict[str, str]:
    """Return what the page sends with every request."""
    page = client.get("/config", params={"file": file})
    assert page.status_code == 200, page.text
    shown = re.search(r'<textarea id="config-text"[^>]*>\n(.*?)</textarea>', page.text, re.DOTALL)
    assert shown is not None
    return {
        "file": file,
        "digest": hidden(page.text, "digest"),
        "section": hidden(page.text, "section"),
        "text": html.unescape(shown[1]) if text is None else text,
    }


def key_of(page: str) -> str:
    found = re.search(r'"key": "([0-9a-f]{32})"', html.unescape(page))
    assert found is not None
    return found[1]


def test_files_of_the_folder_are_listed(owner: httpx.Client, configs: Path) -> None:
    page = owner.get("/config").text
    assert 'href="/config?file=cheap.yaml"' in page and "tasks.py" not in page and str(configs) in page


def test_only_the_person_who_started_the_studio_is_let_in(site: Site, ada: str, studio_buffer: rftdata.Buffer) -> None:
    fields = {"file": "cheap.yaml", "text": CONFIG, "digest": "x", "section": "run", "key": "0" * 32, "process": "x"}
    with account(studio_buffer, "studio_rita", "rft_reader") as rita:
        for name in (ada, rita):
            with site.account(name) as client:
                assert 'href="/config"' not in client.get("/review").text
                assert client.get("/config").status_code == client.get("/config?file=cheap.yaml").status_code == 403
                for verb in ("draft", "field", "save", "save-as", "check", "start", "resume", "stop"):
                    answer = client.post(f"/config/{verb}", data={**fields, "name": "x", "run": "1"})
                    assert (verb, answer.status_code) == (verb, 403)


def test_a_studio_for_several_people_starts_no_runs(tmp_path: Path, studio_buffer: rftdata.Buffer) -> None:
    with pytest.raises(ConfigError, match="starts no runs"):
        StudioSettings(behind_proxy=True, hosts=("studio.example.org",), configs=tmp_path)
    with open_site(studio_buffer) as without, without.owner() as client:
        answer = client.get("/config")
    assert answer.status_code == 404 and "rft studio --configs FOLDER" in answer.text


@pytest.mark.parametrize("name", ["../cheap.yaml", "/etc/hostname.yaml", "model/config.json"])
def test_nothing_outside_the_folder_is_shown_or_written(owner: httpx.Client, name: str) -> None:
    good = state(owner, "cheap.yaml")
    assert owner.get("/config", params={"file": name}).status_code == 422
    for verb in ("save", "check", "start", "draft"):
        assert owner.post(f"/config/{verb}", data={**good, "file": name, "key": "0" * 32}).status_code == 422
    assert owner.post("/config/save-as", data={**good, "name": "../outside.yaml"}).status_code == 422


def test_a_field_changes_its_key_in_the_text_and_nothing_else(owner: httpx.Client, file: str, configs: Path) -> None:
    now = state(owner, file) | {"section": "trainer"}
    answer = owner.post("/config/field", data={**now, "key": "trainer.learning_rate", "value": "1.0e-3"})
    text = html.unescape(answer.text)
    assert CONFIG.replace("  autocast: none\n", "  autocast: none\n  learning_rate: 1.0e-3\n") in text
    assert "<ins>+  learning_rate: 1.0e-3</ins>" in text and (configs / file).read_text() == CONFIG


def test_a_mistake_is_shown_at_its_field_in_the_words_of_the_loader(
    owner: httpx.Client, file: str, configs: Path
) -> None:
    from rftcore.config.run import load_stages

    now = state(owner, file) | {"section": "trainer"}
    wrong = CONFIG.replace("batch_groups: 4", "batch_groups: 0").replace("sync:", "synch:")
    page = html.unescape(owner.post("/config/draft", data={**now, "text": wrong}).text)
    slots = dict(re.findall(r'id="slot-([^"]+)"[^>]*>\s*(.*?)\s*</div>', page, re.DOTALL))
    (configs / "wrong.yaml").write_text(wrong)
    with pytest.raises(ConfigError) as refused:
        load_stages(configs / "wrong.yaml")
    (configs / "wrong.yaml").unlink()
    said = "the key 'trainer.batch_groups' is wrong: Input should be greater than or equal to 1"
    assert said in slots["trainer.batch_groups"] and said in str(refused.value)
    assert "problem" not in slots["trainer.epochs"]
    summary = page.partition('id="config-summary"')[2]
    assert "there is no key 'synch'" in summary and "did you mean 'sync'?" in summary
    for verb in ("save", "start"):
        answer = owner.post(f"/config/{verb}", data={**now, "text": wrong, "key": "0" * 32})
        assert answer.status_code in (409, 422)
    assert (configs / file).read_text() == CONFIG


def test_a_file_with_mistakes_is_not_started(owner: httpx.Client, file: str, configs: Path) -> None:
    (configs / file).write_text(CONFIG.replace("steps: 1000000", "steps: 0"))
    answer = owner.post("/config/start", data={**state(owner, file), "key": "1" * 32})
    assert answer.status_code == 422 and "greater than 0" in html.unescape(answer.text)
    assert not list(configs.glob(f".rft-studio/start-{'1' * 32}*"))


def test_a_save_keeps_comments_and_is_refused_over_a_file_that_changed(
    owner: httpx.Client, site: Site, file: str, configs: Path
) -> None:
    now = state(owner, file)
    new = CONFIG.replace("seed: 1}", "seed: 2}")
    assert owner.post("/config/save", data={**now, "text": new.replace("\n", "\r\n")}).status_code == 200
    assert (configs / file).read_text() == new
    answer = owner.post("/config/save", data={**now, "text": CONFIG})  # the other tab
    assert answer.status_code == 409 and "changed on disk since you opened it" in answer.text
    assert (configs / file).read_text() == new
    assert owner.post("/config/start", data={**now, "key": "2" * 32}).status_code == 409
    unsaved = owner.post("/config/start", data={**state(owner, file), "text": CONFIG, "key": "2" * 32})
    assert unsaved.status_code == 409 and "not saved yet" in unsaved.text
    answer = owner.post("/config/save-as", data={**state(owner, file), "name": "copy of it"})
    assert answer.headers["hx-redirect"] == "/config?file=copy%20of%20it.yaml"
    assert owner.post("/config/save-as", data={**state(owner, file), "name": "copy of it"}).status_code == 409


def test_hostile_texts_do_nothing(owner: httpx.Client) -> None:
    page = owner.get("/config", params={"file": "hostile.yaml"}).text
    assert HOSTILE[0] not in page and HOSTILE[1] not in page and HOSTILE[2] not in page
    assert html.escape(HOSTILE[0]) in page or HOSTILE[0] in html.unescape(page)


def test_check_says_what_rft_check_says(owner: httpx.Client, file: str, configs: Path) -> None:
    (configs / file).write_text(CONFIG.replace("demonstration", "./nowhere.py:flow"))
    answer = html.unescape(owner.post("/config/check", data=state(owner, file)).text)
    assert "refuses the configuration" in answer and "nowhere.py" in answer


def runs_of(client: httpx.Client, file: str) -> str:
    return html.unescape(client.get("/config/runs", params={"file": file}).text)


def test_a_start_that_ends_with_an_error_shows_it(owner: httpx.Client, file: str, configs: Path) -> None:
    (configs / file).write_text(CONFIG.replace("./tasks.py", "./no_tasks.py").replace("cheap", "broken"))
    assert owner.post("/config/start", data={**state(owner, file), "key": "3" * 32}).status_code == 200
    wait_until(lambda: "ended before it stored a run" in runs_of(owner, file))
    page = runs_of(owner, file)
    assert "no_tasks.py" in page and "Started by olga" in page and "Resume" not in page


def test_a_run_is_started_once_outlives_the_studio_is_stopped_and_resumed(
    studio_buffer: rftdata.Buffer, configs: Path, file: str
) -> None:
    def runs() -> list[dict[str, Any]]:
        return studio_buffer.sql(
            "SELECT run_id, status::text AS status, outcome FROM rft.run WHERE name LIKE 'cheap%'"
        ).to_pylist()

    def has_trained(least: int) -> bool:
        steps = studio_buffer.sql(
            "SELECT max(s.trainer_step) AS n FROM rft.v_train_step s JOIN rft.run r USING (run_id) WHERE r.name = 'cheap'"
        )["n"][0].as_py()
        return steps is not None and steps >= least

    with open_site(studio_buffer, configs=configs) as first, first.owner() as client:
        now = state(client, file)
        answers = [client.post("/config/start", data={**now, "key": "4" * 32}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200] and "starts" in answers[1].text
        other = client.post("/config/start", data={**now, "key": "5" * 32})
        assert other.status_code == 409 and "is at work" in html.unescape(other.text)
        wait_until(lambda: has_trained(2))
    with open_site(studio_buffer, configs=configs, author="otto") as second, second.owner() as client:
        page = runs_of(client, file)
        assert "at work" in page and "Started by olga" in page and len(runs()) == 1
        assert f"config={configs}" not in page and str(configs / ".rft-studio") in page
        process = re.search(r'"process": "([^"]+)"', page)
        assert process is not None
        for _ in range(2):  # a second signal would kill its roles
            answer = client.post("/config/stop", data={"process": process[1], "file": file})
            assert answer.status_code == 200 and "stopped by otto" in answer.text
        wait_until(lambda: runs()[0]["status"] == "interrupted" and "Resume" in runs_of(client, file))
        assert runs()[0]["outcome"] == "stopped by a person"
        assert client.post("/config/stop", data={"process": process[1], "file": file}).status_code == 409
        run = runs()[0]["run_id"]
        begun = studio_buffer.sql("SELECT count(*) AS n FROM rft.run_attempt")["n"][0].as_py()
        again = {**state(client, file), "key": "6" * 32, "run": str(run)}
        assert [client.post("/config/resume", data=again).status_code for _ in range(2)] == [200, 200]
        wait_until(lambda: studio_buffer.sql("SELECT count(*) AS n FROM rft.run_attempt")["n"][0].as_py() > begun)
        assert len(runs()) == 1 and "at work" in runs_of(client, file)
        assert client.post("/config/resume", data={**again, "key": "7" * 32}).status_code == 409


@pytest.fixture
def tab(browser: Any, site: Site) -> Iterator[Any]:
    """A tab of the owner. The test fails if it reports an error, or a violation of the content security policy."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, locale="en")
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(REPORT_VIOLATIONS)
    errors: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: errors.append(message.text) if is_error(message) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(site.server.address())
    page.wait_for_url(f"{site.origin}/review")
    yield page
    context.close()
    assert errors == []


def field(tab: Any, key: str) -> Any:
    return tab.locator(f"[id='field-{key}']")


def type_into(tab: Any, key: str, value: str) -> None:
    field(tab, key).fill(value)
    with tab.expect_response("**/config/field"):
        field(tab, key).press("Tab")


def test_an_owner_edits_starts_and_stops_a_run_in_the_browser(tab: Any, site: Site, file: str, configs: Path) -> None:
    (configs / file).write_text(CONFIG.replace("cheap", "by-hand"))
    tab.goto(f"{site.origin}/config")
    tab.get_by_role("link", name=file).click()
    text, summary, runs = tab.locator("#config-text"), tab.locator("#config-summary"), tab.locator("#config-runs")
    tab.get_by_role("button", name="trainer").click()
    type_into(tab, "trainer.batch_groups", "0")
    problem = tab.locator("[id='slot-trainer.batch_groups'] .problem")
    assert "greater than or equal to 1 (got 0)" in problem.inner_text() and "Mistakes: 1" in summary.inner_text()
    tab.keyboard.press("Escape")  # leaves the field
    tab.keyboard.press("s")
    tab.locator("#problems", has_text="would refuse this configuration").wait_for()
    tab.reload()
    tab.locator("#config-summary", has_text="Mistakes: 1").wait_for()  # the draft is still there
    tab.get_by_role("button", name="trainer").click()
    type_into(tab, "trainer.batch_groups", "8")
    type_into(tab, "trainer.learning_rate", "1.0e-3")
    assert problem.count() == 0 and "batch_groups: 8   # few" in text.input_value()
    assert "+  learning_rate: 1.0e-3" in summary.locator("ins").all_inner_texts()
    for width in (1200, 360):
        tab.set_viewport_size({"width": width, "height": 800})
        assert (width, violations(tab)) == (width, [])
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.keyboard.press("Escape")  # leaves the field
    tab.keyboard.press("s")
    tab.locator("#config-summary", has_text="The text is what is on the disk").wait_for()
    assert "batch_groups: 8   # few" in (configs / file).read_text() and "# its name" in (configs / file).read_text()
    tab.keyboard.press("r")
    runs.locator(".tag", has_text="starts").wait_for()
    assert tab.locator("#config-start").is_disabled()
    runs.locator(".tag", has_text="at work").wait_for()
    assert violations(tab) == []
    runs.get_by_role("button", name="Stop").click()
    runs.get_by_text("stopped by olga").wait_for()
    runs.get_by_role("button", name="Resume").wait_for()
    assert "interrupted" in runs.inner_text()
    tab.goto(f"{site.origin}/config")
    assert violations(tab) == [] and tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_what_is_typed_while_an_answer_is_under_way_stays_and_a_draft_over_a_newer_file_is_reported(
    tab: Any, site: Site, file: str, configs: Path
) -> None:
    waiting: list[Any] = []

    def under_way(path: str, action: Callable[[], None], typed: Callable[[], None]) -> None:
        """Type while the answer to what an action sends is under way."""
        tab.route(path, lambda route: waiting.append(route))
        with tab.expect_request(path):
            action()
        typed()
        while waiting:
            waiting.pop().continue_()
        tab.unroute(path)

    def note(line: str) -> None:
        text.click()
        tab.keyboard.press("Control+End")
        tab.keyboard.type(line)

    tab.goto(f"{site.origin}/config?file={file}")
    text, notice = tab.locator("#config-text"), tab.locator("#config-newer")
    field(tab, "run.seed").fill("7")
    under_way("**/config/field", lambda: field(tab, "run.seed").press("Tab"), lambda: note("# first"))
    wait_until(lambda: "seed: 7" in text.input_value())
    assert text.input_value().endswith("# first")
    save = tab.get_by_role("button", name="s Save")
    under_way("**/config/save", save.click, lambda: note(" second"))
    tab.locator("ins", has_text="# first second").wait_for()
    assert (configs / file).read_text().endswith("# first\n") and text.input_value().endswith("# first second")
    assert notice.is_hidden()

    (configs / file).write_text(CONFIG.replace("seed: 1", "seed: 9"))
    tab.reload()
    notice.wait_for()
    # The runs of the page come again while the answer to the draft is under way.
    tab.evaluate("htmx.trigger('#config-runs', 'live')")
    tab.locator("[data-unsaved]").wait_for()
    assert notice.is_visible()
    assert violations(tab) == [] and text.input_value().endswith("# first second")
    tab.get_by_role("button", name="Discard the draft").click()
    notice.wait_for(state="hidden")
    assert "seed: 9" in text.input_value()
