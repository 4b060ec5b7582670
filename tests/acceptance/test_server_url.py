"""A whole run on a PostgreSQL server with a password and on a Ray cluster of two nodes, as provided by an administrator.

Nothing else changes; the password stays where the user put it; the pipeline workers are on both nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
import pytest
import yaml
from psycopg import sql

import rftdata
from rftdata.config import BufferConfig
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.programs import binary_dir
from tests.support.command_line import EXAMPLE, Rft, rft_command, rft_environment
from tests.support.ports import closed_port
from tests.support.small_runs import RUN, STEPS, settings
from tests.support.waiting import PATIENCE_S, RUN_S, printed_by, wait_until
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# With characters that a URL, a shell or a regular expression would take for something else; no other test run's password.
PASSWORD = f"s3cr3t/w:th@ödd %41{secrets.token_hex(4)}"

_TOO_SLOW = "current node timed out during startup"


@dataclass
class Finished:
    """A finished run on the server, and everything it could have left the password in."""

    url: str
    folder: Path
    output: str
    command_lines: set[str]
    ray_folder: Path
    parents: dict[int, int]


@pytest.fixture(scope="module")
def url(server_folders: Path) -> Iterator[str]:
    """A database of an ordinary account, reached by TCP: what an administrator would hand out."""
    with closed_port() as port:
        server = EmbeddedServer(server_folders / "tcp", listen=f"127.0.0.1:{port}")
        yield from _served(server, port)


def _served(server: EmbeddedServer, port: int) -> Iterator[str]:
    with psycopg.connect(server.start(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE trainee LOGIN PASSWORD {}").format(sql.Literal(PASSWORD)))
        connection.execute("CREATE DATABASE experiences OWNER trainee")
    yield f"postgresql://trainee:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/experiences"
    server.stop()


@dataclass
class RayCluster:
    """Two nodes, each with the processes that a machine of a cluster has, and a GPU that is only declared."""

    address: str
    folder: Path
    token: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="rft-", dir="/tmp"))  # unix sockets of Ray have short names only
    with closed_port() as port:
        address = f"127.0.0.1:{port}"
        yield from _started(address, folder, tmp_path_factory)


def _started(address: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    common = [
        "--block",
        "--num-cpus=2",
        "--num-gpus=1",
        f"--object-store-memory={128 * 2**20}",
        "--disable-usage-stats",
    ]
    head = ["--head", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}", "--include-dashboard=false"]
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
    # Without this, Ray's own default depends on whether a token lies in the home folder.
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # the nodes' GPUs are only numbers
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for options in (["--node-ip-address=127.0.0.1", *head], [f"--address={address}"]):
            said = tmp_path_factory.mktemp("node") / "output"
            command = [*ray, *options, *common]
            nodes.append(start_node(command, environment, said))
            if not has_started(nodes[-1], said):
                stop_node(nodes.pop())
                nodes.append(start_node(command, environment, said))
                assert has_started(nodes[-1], said), said.read_text()
        yield RayCluster(address, folder, environment["RAY_AUTH_TOKEN"])
    finally:
        for node in reversed(nodes):
            stop_node(node)
        shutil.rmtree(folder, ignore_errors=True)


def start_node(command: list[str], environment: dict[str, str], said: Path) -> subprocess.Popen[bytes]:
    with said.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def has_started(node: subprocess.Popen[bytes], said: Path) -> bool:
    """Wait for a node. It has not started only if Ray waited for its raylet in vain: Ray's limit of 30 s is fixed, and short for a busy machine."""

    def is_decided() -> bool:
        text = said.read_text()
        assert node.poll() is None or _TOO_SLOW in text, text
        return "Ray runtime started" in text or node.poll() is not None

    wait_until(is_decided, "the start of the node", pause_s=0.2)
    return node.poll() is None


def stop_node(node: subprocess.Popen[bytes]) -> None:
    """End a node's own processes: `ray stop` would end those of every other cluster on this machine, too."""
    its_own = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
    node.terminate()
    for process in (*its_own, node):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def finished(url: str, cluster: RayCluster, warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("server")
    config = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    # The address comes from a file that only its owner reads; the segments are relative to where `rft run` is called.
    config["buffer"] = {"uri": url, "segments": "./arrays/segments"}
    (folder / "grpo.yaml").write_text(yaml.safe_dump(config))
    (folder / "grpo.yaml").chmod(0o600)
    shutil.copy(EXAMPLE / "tasks.py", folder)
    process = subprocess.Popen(
        rft_command(
            "run",
            folder / "grpo.yaml",
            "--plain",
            *settings(warm, "monitor=[tensorboard]", "pipelines.workers=2", "sync.method=checkpoint"),
        ),
        env={
            **rft_environment(),
            "RAY_ADDRESS": cluster.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": cluster.token,
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen: set[str] = set()
    parents: dict[int, int] = {}
    ended = threading.Event()

    def look() -> None:
        # What `ps` shows to every user of this machine during the run.
        while not ended.wait(0.25):
            for other in psutil.process_iter(["cmdline", "ppid"]):
                seen.add(" ".join(other.info["cmdline"] or ()))
                parents[other.pid] = other.info["ppid"]

    looking = threading.Thread(target=look)
    looking.start()
    try:
        output = printed_by(process)
    finally:
        ended.set()
        looking.join()
        process.kill()
    assert process.returncode == 0, output
    return Finished(url, folder, output, seen, cluster.folder, parents)


def spellings() -> list[str]:
    """The password as it is, as it stands in a URL, and as JSON writes it."""
    return [PASSWORD, quote(PASSWORD, safe=""), json.dumps(PASSWORD)[1:-1]]


def assert_no_password(text: str, where: str) -> None:
    for spelling in spellings():
        assert spelling not in text, f"the password is in {where}"


def test_the_run_finishes_and_reports_itself(finished: Finished) -> None:
    assert f"{STEPS} steps done" in finished.output, finished.output
    assert "Traceback" not in finished.output
    assert_no_password(finished.output, "the output of rft run")
    # The next commands it proposes are for this buffer.
    assert "--buffer 'postgresql://trainee" in finished.output


def test_explorer_and_trainer_have_the_gpu_of_a_node_each(finished: Finished) -> None:
    assert re.search(r"explorer: 1 GPU of [\w.-]+; trainer: 1 GPU of [\w.-]+\n", finished.output), finished.output
    with psycopg.connect(finished.url) as connection:
        pids = [
            pid for (pid,) in connection.execute("SELECT pid FROM rft.worker WHERE role IN ('explorer', 'trainer')")
        ]
    assert len({finished.parents[pid] for pid in pids}) == 2, "each has the raylet of a node as its parent"


def test_a_deep_check_prints_the_plan_for_the_cluster(cluster: RayCluster, warm: Warm, tmp_path: Path) -> None:
    token = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}
    sync, buffer = ("--set", "sync.method=checkpoint"), ("--buffer", tmp_path / "buffer")
    process = subprocess.run(
        rft_command("check", EXAMPLE / "grpo.yaml", "--deep", *buffer, *settings(warm, "pipelines.workers=2"), *sync),
        env={**rft_environment(), **token},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    plan = process.stderr.partition("plan for ")[2].splitlines()
    assert plan[0].endswith(", 2 GPUs:")
    assert [line.split()[1:5] for line in plan[1:3]] == [["explorer", "1", "GPU", "of"], ["trainer", "1", "GPU", "of"]]
    assert [line.split()[1:4] for line in plan[3:5]] == [["pipeline", "0", "CPU"], ["pipeline", "1", "CPU"]]


def test_pipeline_workers_are_spread_over_the_nodes_and_both_decide(finished: Finished) -> None:
    with psycopg.connect(finished.url) as connection:
        pids = [pid for (pid,) in connection.execute("SELECT pid FROM rft.worker WHERE role = 'pipeline'")]
    assert len(pids) == 2
    assert len({finished.parents[pid] for pid in pids}) == 2, "each has the raylet of a node as its parent"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_cluster_that_cannot_be_joined_is_one_paragraph(
    cluster: RayCluster, warm: Warm, tmp_path: Path, is_there: bool
) -> None:
    with closed_port() as port:
        address = cluster.address if is_there else f"127.0.0.1:{port}"
        process = subprocess.run(
            rft_command("run", EXAMPLE / "grpo.yaml", "--plain", "--buffer", tmp_path / "buffer", *settings(warm)),
            env={**rft_environment(), "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    assert process.returncode == 2, process.stderr
    (said,) = [line for line in process.stderr.splitlines() if line.startswith("rft: ")]
    assert address in said and "RAY_AUTH_MODE=token" in said and "Traceback" not in process.stderr


def test_nothing_that_ps_shows_holds_the_password(finished: Finished) -> None:
    assert any("raylet" in line for line in finished.command_lines)
    assert_no_password("\n".join(finished.command_lines), "a command line")


def test_no_file_of_the_run_or_of_ray_holds_the_password(finished: Finished) -> None:
    files = [
        path
        for root in (finished.folder, finished.ray_folder)
        for path in root.rglob("*")
        if path.is_file() and path != finished.folder / "grpo.yaml"
    ]
    assert any(path.suffix == ".log" or ".log" in path.name for path in files)
    for path in files:
        data = path.read_bytes()
        assert not any(spelling.encode() in data for spelling in spellings()), f"the password is in {path}"


def test_the_database_does_not_hold_its_own_password(finished: Finished) -> None:
    dumped = subprocess.run(
        [binary_dir() / "pg_dump", finished.url], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    assert RUN in dumped
    assert_no_password(dumped, "the database")
    with psycopg.connect(finished.url) as connection:
        found = connection.execute("select config->'buffer'->>'uri' from rft.run").fetchone()
    assert found is not None and found[0].startswith("postgresql://trainee:…@127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sql", "select count(*) from rft.run"], ["1"]),
        (["sql", "--json", "select status from run"], ["finished"]),
        (["query", "--json", "select count(*) as n, max(len(token_ids)) > 0 as filled from experience"], ["true"]),
        (["report"], [RUN]),
        (["report", RUN, "--json"], ['"status": "finished"']),
        (["status"], [f"{RUN}: finished"]),
        (["status", "--json"], ['"status": "finished"']),
        (["lineage", "1"], []),
        (["label", "history"], []),
        (["tasks", "list"], ["sort-train"]),
        (["doctor"], ["all is well"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].islower() else "",
)
def test_commands_find_rows_and_arrays_from_any_folder(
    finished: Finished, rft: Rft, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    result = rft(*arguments, "--buffer", finished.url, cwd=tmp_path)
    assert all(word in result.stdout for word in words), result.stdout
    assert_no_password(result.stdout + result.stderr, f"the output of rft {arguments[0]}")
    assert list(tmp_path.iterdir()) == []  # reading makes no folders


def test_a_wrong_password_is_one_paragraph_without_it(finished: Finished, rft: Rft) -> None:
    wrong = finished.url.replace(quote(PASSWORD, safe=""), "gu3ss")
    result = rft("status", "--buffer", wrong, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("rft: ") and result.stderr.count("\n") == 1, result.stderr
    assert "password authentication failed" in result.stderr and "trainee" in result.stderr
    assert "gu3ss" not in result.stderr


def test_the_arrays_lie_in_the_folder_and_are_whole(finished: Finished) -> None:
    segments = finished.folder / "arrays" / "segments"
    assert list(segments.glob("*.arrows"))
    assert (finished.folder / "arrays" / "runs" / RUN / "learning_curve.png").is_file()
    with rftdata.open(BufferConfig(uri=finished.url, segments=str(segments))) as opened:
        assert list(verify(opened)) == []


def test_a_finished_run_is_found_by_resume_from_another_folder(finished: Finished, rft: Rft, tmp_path: Path) -> None:
    again = rft("run", "--resume", "--plain", "--buffer", finished.url, cwd=tmp_path)
    assert "nothing is left to do" in again.stdout
    assert_no_password(again.stdout + again.stderr, "the output of rft run --resume")
    assert list(tmp_path.iterdir()) == []
