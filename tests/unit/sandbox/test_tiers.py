"""The choice of a tier, and the refusal where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.config.reward import RewardConfig
from rftcore.rewards import load_rewards
from rftcore.sandbox import tiers
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.interpreter import Interpreter
from rftcore.sandbox.kinds import open_sandbox
from rftcore.sandbox.program import Program, run
from rftdata.errors import ConfigError, PluginError
from tests.support.sandboxes import sandbox_here, strongest_level_here

# It ends at once, so each tier is refused on every machine, as on one that offers none.
NO_INTERPRETER = Interpreter("/bin/false", ())


def test_a_machine_without_any_tier_refuses_and_says_why_for_each() -> None:
    with pytest.raises(ConfigError) as raised:
        tiers.strongest_level(NO_INTERPRETER, unsafe_local=False)
    text = str(raised.value)
    assert all(f"{tiers.tier_name(level)}: " in text for level in ("cgroup", "namespaces", "landlock"))
    assert "sandbox: {unsafe_local: true}" in text
    assert tiers.strongest_level(NO_INTERPRETER, unsafe_local=True) == "none"


def test_the_reward_is_refused_at_its_construction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiers, "probe", lambda level, interpreter: "not on this machine")
    monkeypatch.delenv("RFT_SANDBOX_HELD", raising=False)
    tiers.refusal.cache_clear()
    try:
        reward = RewardConfig.model_validate({"name": "unit_tests"})
        with pytest.raises(
            ConfigError, match=r"the reward 'unit_tests': this machine offers no sandbox.*not on this machine"
        ):
            load_rewards([reward], tmp_path)
        unsafe = RewardConfig.model_validate({"name": "unit_tests", "sandbox": {"unsafe_local": True}})
        (loaded,) = load_rewards([unsafe], tmp_path).values()
        assert loaded.function.sandbox_tier == "none (unsafe_local)"
    finally:
        tiers.refusal.cache_clear()


def test_processes_that_are_started_later_do_not_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    level = strongest_level_here()

    def must_not_run(*_: object) -> None:
        raise AssertionError("tried again")

    tiers.refusal.cache_clear()
    monkeypatch.setattr(tiers, "probe", must_not_run)
    assert tiers.refusal(level, Interpreter.of(None)) is None


def test_without_confinement_limits_hold_all_the_same(tmp_path: Path) -> None:
    from rftcore.sandbox.host_process import HostProcess, request_of

    host = HostProcess()
    program = Program(["{python}", "-I", "-c", "while True: print('x' * 100)"])
    running = host.start(request_of(program, SandboxConfig(), Interpreter.of(None), "none"), program)
    assert running.wait().killed == "output"
    running.close()
    host.close()


def test_another_interpreter_brings_its_packages(tmp_path: Path) -> None:
    import sys

    with sandbox_here(SandboxConfig(python=sys.executable)) as sandbox:
        report = run(sandbox, Program(["{python}", "-I", "-c", "import pydantic; print('found')"]))
        assert report.stdout == b"found\n", report.stderr.decode()
    with pytest.raises(ConfigError, match="the interpreter of the sandbox does not run"):
        open_sandbox(SandboxConfig(python="/nowhere/python"))


OWN = """
from rftcore.sandbox.request import Report

class Remote:
    tier = "a service"
    def __init__(self, config): self.name = config.args["name"]
    def start(self, program): return self
    def wait(self): return Report(code=0, stdout=self.name.encode())
    def close(self): pass
"""


def test_a_sandbox_of_ones_own_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "remote.py").write_text(OWN)
    config: dict[str, Any] = {"type": "./remote.py:Remote", "args": {"name": "eu-1"}}
    sandbox = open_sandbox(SandboxConfig.model_validate(config), tmp_path)
    assert sandbox.tier == "a service"
    assert run(sandbox, Program(["x"])).stdout == b"eu-1"
    (loaded,) = load_rewards(
        [RewardConfig.model_validate({"name": "unit_tests", "sandbox": config})], tmp_path
    ).values()
    assert loaded.function.sandbox_tier == "a service"
    with pytest.raises(PluginError, match="unknown sandbox"):
        open_sandbox(SandboxConfig(type="docker-in-docker"), tmp_path)
