"""How long pages of the studio and commands take with many experiences and labels, at two sizes of the buffer.

A buffer of each size has four runs with verdicts of two versions, draws, checkpoints and evaluations, an annotation of some kind for each eight
experiences, and a question about each fourth one. With `--folder`, buffers are kept there, and used again.

    pages     milliseconds of a request: the first one, and the median of three
    commands  seconds of a command, with the start of Python (`rft --version`)
    growth    of the greatest size by the smallest one, for the median of a page and the seconds of a command without the start of Python;
              linear growth is the ratio of the sizes

Pages that change something (`relabel`, `undo`, `claim`) are requested once or with other rows each time.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integers, kept_folder, names
from benchmarks.harness.report import say, write
from benchmarks.harness.rft import command, environment
from benchmarks.studio.client import signed_in
from benchmarks.studio.labelled_buffer import fill
from rftcore.studio.server import StudioServer
from rftcore.studio.settings import StudioSettings
from rftdata.buffer import Buffer
from rftdata.config import BufferConfig

if TYPE_CHECKING:
    import httpx

_TIMES = 3
_PASSWORD = "a password"
_ACCOUNT = "rft_bench_labeler"


@dataclass(frozen=True)
class Rows:
    """Rows of a buffer that addresses name: the newest run, and the newest experience, group and task of it, and one that is labelled."""

    run: int
    oldest_run: int
    experience: int
    group: int
    task: int
    step: int
    labelled: int


def rows_of(buffer: Buffer) -> Rows:
    found = buffer.sql(
        "SELECT max(e.run_id) AS run, min(e.run_id) AS oldest_run, max(e.experience_id) AS experience, max(e.group_id) AS group,"
        " (SELECT max(task_id) FROM rft.task) AS task, (SELECT max(trainer_step) FROM rft.checkpoint) AS step,"
        " (SELECT max(target_id) FROM rft.annotation WHERE kind = 'score') AS labelled FROM rft.experience e"
    )
    return Rows(**found.to_pylist()[0])


def addresses(rows: Rows) -> dict[str, str]:
    """Return the addresses of all pages and parts that read, by what they show."""
    of_run, condition = f"run={rows.run}", "/experiences?where="
    histograms = "/experiences/histograms?where="
    labelled = "experience_id IN (SELECT target_id FROM rft.v_annotation WHERE kind = 'score' AND num < 0.2)"
    return {
        "review": "/review",
        "review items": "/review/items?count=3",
        "review progress": "/review/progress",
        "label kinds": "/label",
        "label": "/label/helpful",
        "label items, experiences": "/label/critique/items?count=3",
        "label items, experiences of the newest run": f"/label/critique/items?count=3&{of_run}",
        "label items, groups": "/label/best/items?count=3",
        "label items, groups of the newest run": f"/label/best/items?count=3&{of_run}",
        "label progress": "/label/score/progress",
        "experience": f"/experience/{rows.labelled}",
        "group": f"/group/{rows.group}",
        "experiences": "/experiences",
        "experiences of the oldest run": f"/experiences?run={rows.oldest_run}",
        "experiences by reward": condition + "reward = 1",
        "experiences by state": condition + "state = 'dropped'",
        "experiences by text": condition + "response LIKE '%25carry carry carry%25'",
        "experiences, none matches": condition + "reward = 7",
        "experiences by label": condition + labelled,
        "histograms": histograms,
        "histograms of the oldest run": f"/experiences/histograms?run={rows.oldest_run}",
        "histograms by state": histograms + "state = 'dropped'",
        "histograms, none matches": histograms + "reward = 7",
        "runs": "/runs",
        "run": f"/run/{rows.run}",
        "run state": f"/run/{rows.run}/state",
        "step, sampled": f"/run/{rows.run}/step/1",
        "step, trained": f"/run/{rows.run}/step/{rows.step}?trained=true",
        "compare runs": f"/runs/compare?id={rows.run}&id={rows.oldest_run}",
        **{f"curve of {name}": f"/runs/curve.json?id={rows.run}&of={name}" for name in _CURVES},
        "pipeline": f"/pipeline?{of_run}",
        "pipeline of the oldest run": f"/pipeline?run={rows.oldest_run}",
        "version difference": f"/pipeline/difference?{of_run}&before=history&after=other",
        "tasks": "/tasks?taskset=benchmark",
        "tasks by status": "/tasks?taskset=benchmark&status=rejected",
        "task": f"/task/{rows.task}?{of_run}",
        "pairs": "/pairs",
        "pairs of the oldest run": f"/pairs?run={rows.oldest_run}",
        "quality": "/quality",
        "quality of a run": f"/quality?{of_run}",
        "disagreement": "/quality/score",
        "checkpoints": f"/checkpoints?{of_run}",
        "corrected since": f"/checkpoints/corrected?{of_run}&step={rows.step}",
    }


_CURVES = ("reward", "evaluations", "tokens_per_s", "staleness", "metric:loss")


def measure_pages(buffer: Buffer, account: str | None) -> dict[str, dict[str, Any]]:
    """Return milliseconds of each page, for the owner or for an account that may label."""
    rows, found = rows_of(buffer), {}
    with (
        StudioServer(buffer, StudioSettings(author="bench")).in_thread() as server,
        signed_in(server, account, _PASSWORD) as client,
    ):
        for name, address in addresses(rows).items():
            found[name] = timed(partial(client.get, address))
        for name, request in changes(client, rows).items():
            found[name] = timed(request)
    return found


def changes(client: httpx.Client, rows: Rows) -> dict[str, Callable[[], httpx.Response]]:
    """Return requests that change something: claims of three questions, an answer, one reward for a run's sixteenth and back."""
    where, run = "experience_id % 16 = 0", str(rows.oldest_run)
    rewards = iter(time.time() % 1 + i for i in range(100))
    held: list[str] = []

    def claim() -> httpx.Response:
        answer = client.post("/label/helpful/claim", data={"count": "3", "holding": ",".join(held)})
        held.extend(re.findall(r'data-question="(\d+)"', answer.text))
        return answer

    def preview(reward: float | None = None) -> httpx.Response:
        fields = {"where": where, "run": run, "reward": str(next(rewards) if reward is None else reward)}
        return client.post("/experiences/relabel/preview", data=fields)

    def relabel() -> httpx.Response:
        reward = next(rewards)
        fields = {"where": where, "run": run, "reward": str(reward), "digest": hidden(preview(reward), "digest")}
        done.append(client.post("/experiences/relabel", data=fields))
        return done[-1]

    def undo() -> httpx.Response:
        return client.post("/experiences/undo", data={"label_batch_id": hidden(done.pop(), "label_batch_id")})

    done: list[httpx.Response] = []
    return {"claim": claim, "relabel preview": preview, "relabel, with its preview": relabel, "undo of relabel": undo}


def hidden(page: httpx.Response, name: str) -> str:
    """Return the value of a field that a page sends back."""
    found = re.search(rf'name="{name}" value="(\w+)"', page.text)
    assert found is not None, page.text
    return found[1]


def timed(request: Callable[[], httpx.Response]) -> dict[str, Any]:
    taken, status = [], 0
    for _ in range(_TIMES):
        started = time.perf_counter()
        status = request().status_code
        taken.append(1000 * (time.perf_counter() - started))
        if taken[0] > 5000:
            break
    return {"first": round(taken[0], 1), "median": round(statistics.median(taken), 1), "status": status}


def commands(rows: Rows, folder: Path) -> dict[str, list[str]]:
    """Return the commands by their names, in an order in which none hinders a later one."""
    run, oldest = str(rows.run), str(rows.oldest_run)
    return {
        "rft --version": ["--version"],
        "rft label ask, one experience in four": [
            *("label", "ask", "helpful", "SELECT experience_id FROM rft.experience WHERE experience_id % 4 = 1")
        ],
        "rft label agreement": ["label", "agreement"],
        "rft label disagreements": ["label", "disagreements", "score"],
        "rft label history": ["label", "history"],
        "rft label export": ["label", "export", str(folder / "labels.jsonl")],
        "rft status": ["status", run],
        "rft report": ["report", run, "--json"],
        "rft pipeline diff": ["pipeline", "diff", "history", "other", "--run", run],
        "rft pairs labels": ["pairs", "labels", run],
        "rft pairs build": ["pairs", "build", oldest],
        "rft lineage --checkpoint": ["lineage", "--checkpoint", str(rows.step), "--run", run],
        "rft export, a run": ["export", str(folder / "run.parquet"), "--run", run],
        "rft export": ["export", str(folder / "all.parquet")],
        "rft doctor": ["doctor"],
        "rft purge, one experience in 400": [
            *("purge", "--where", "experience_id % 400 = 0", "--reason", "bench", "--run", oldest)
        ],
        "rft archive, a run": ["archive", oldest],
        "rft restore-run": ["restore-run", oldest],
    }


def measure_commands(buffer: Buffer, folder: Path) -> dict[str, float]:
    """Return seconds of each command."""
    seconds = {}
    buffer.sql("UPDATE rft.run SET status = 'finished', finished_at = now() WHERE status <> 'finished'")
    for name, arguments in commands(rows_of(buffer), folder).items():
        at = [] if arguments == ["--version"] else ["--buffer", str(buffer.folder)]
        started = time.perf_counter()
        done = subprocess.run(command(*arguments, *at), env=environment(), capture_output=True, text=True, check=False)
        seconds[name] = round(time.perf_counter() - started, 2)
        if done.returncode:
            say(f"{name}: exit code {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        say(f"{seconds[name]:8.2f} s  {name}")
    return seconds


def measure(folder: Path, num: int, what: Sequence[str]) -> dict[str, Any]:
    is_new = not folder.exists()
    found: dict[str, Any] = {}
    with rftdata.open(BufferConfig(uri=str(folder), min_free_bytes=0)) as buffer:
        started = time.perf_counter()
        if is_new:
            fill(buffer, num)
            create_account(buffer)
            say(f"{num} experiences with labels after {time.perf_counter() - started:.0f} s")
        if "commands" in what:
            found["commands"] = measure_commands(buffer, folder.parent)
        if "pages" in what:
            found["pages"] = measure_pages(buffer, None)
        if "labeler" in what:
            found["labeler"] = measure_pages(buffer, _ACCOUNT)
    return found


def create_account(buffer: Buffer) -> None:
    """Create an account that may read and label."""
    buffer.sql(f"CREATE ROLE {_ACCOUNT} LOGIN PASSWORD '{_PASSWORD}' IN ROLE rft_labeler")


def growth(small: dict[str, Any], large: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the growth of each page and command."""
    found: dict[str, dict[str, float]] = {}
    for what, figures in large.items():
        if what == "commands":
            start = (small[what]["rft --version"], figures["rft --version"])
            found[what] = {
                name: round(max(seconds - start[1], 0.01) / max(small[what][name] - start[0], 0.01), 1)
                for name, seconds in figures.items()
            }
        else:
            found[what] = {
                name: round(each["median"] / small[what][name]["median"], 1) for name, each in figures.items()
            }
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure; print JSON; return the exit code."""
    parser = argument_parser("pages", __doc__)
    parser.add_argument("--sizes", type=integers(1280), default=(40_000, 400_000), help="numbers of experiences")
    parser.add_argument(
        "--what",
        type=names("commands", "pages", "labeler"),
        default=["commands", "pages", "labeler"],
        help="pages: those of the owner; labeler: those of an account that may label",
    )
    options = parser.parse_args(arguments)
    with kept_folder(options) as folder:
        results = {num: measure(folder / str(num), num, options.what) for num in sorted(options.sizes)}
    smallest, greatest = min(results), max(results)
    write(options, {"results": results, "growth": growth(results[smallest], results[greatest])})
    return 0
