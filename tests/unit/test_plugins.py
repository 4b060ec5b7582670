"""Naming a user's object: by file, by entry point, by dotted path; a failure to load is a clear error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rftdata.errors import PluginError
from rftdata.plugins import Registry
from rftdata.user_code.time_limits import at_most

REWARDS = Registry[Callable[..., object]]("reward", {"own": "json:loads"})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with an installed package that brings three rewards, two of which do not load."""
    info = tmp_path / "their_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rftdata.reward]\ngood = json:dumps\nown = json:dumps\nno_module = not_installed_anywhere:reward\n"
        "no_object = json:no_such_reward\njson.loads = json:dumps\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["no_module", "no_object"])
def test_an_entry_point_that_does_not_load_is_a_clear_error(installed: Path, name: str) -> None:
    with pytest.raises(
        PluginError, match=f"the reward '{name}' of the package their-rewards does not load.*repair or remove"
    ):
        REWARDS.load(name)


def test_an_import_that_does_not_return_is_ended(installed: Path, tmp_path: Path) -> None:
    """Whether the object is named by a dotted path, an entry point, or a file, which `rft check` waits for less long than a run."""
    (tmp_path / "never_loads.py").write_text("while True:\n    pass\n")
    entry_points = tmp_path / "their_rewards-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(f"{entry_points.read_text()}endless = never_loads:reward\n")
    hasty = replace(REWARDS, loading_s=0.3)
    for name in ("never_loads:reward", "endless"):
        with pytest.raises(PluginError, match=r"the import of never_loads.* did not return within 0\.3 s"):
            hasty.load(name)
    with (
        at_most(0.1, "rft check", loading_s=0.3),
        pytest.raises(PluginError, match=r"rft check waits 0\.3 s at most, and a run 300 s"),
    ):
        REWARDS.load("./never_loads.py:reward", tmp_path)


def test_names_are_looked_up_among_built_ins_then_entry_points_then_as_dotted_paths(installed: Path) -> None:
    import json

    assert REWARDS.load("own") is json.loads
    assert REWARDS.load("good") is json.dumps
    assert REWARDS.load("json.loads") is json.dumps
    assert REWARDS.load("json:loads") is json.loads
    assert set(REWARDS.names()) >= {"own", "good", "no_module"}


def test_a_package_that_is_installed_later_is_found(installed: Path) -> None:
    with pytest.raises(PluginError, match="unknown reward"):
        REWARDS.load("later")
    info = installed / "later-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rftdata.reward]\nlater = json:dumps\n")
    assert "later" in REWARDS.names()


def test_an_edited_file_is_read_again_an_unchanged_one_is_one_module(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward():\n    return 1\n")
    first = REWARDS.load("./reward.py:reward", tmp_path)
    assert REWARDS.load("./reward.py:reward", tmp_path) is first
    file.write_text("def reward():\n    return 2\n")
    assert REWARDS.load("./reward.py:reward", tmp_path)() == 2


def test_a_file_that_raises_states_what_and_where(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("1 / 0\n")
    with pytest.raises(PluginError, match=r"does not load: ZeroDivisionError: division by zero; correct .*reward\.py"):
        REWARDS.load("./reward.py:reward", tmp_path)


def test_threads_that_load_one_file_at_a_time_get_the_same_whole_module(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.2)\n\n\ndef score(): ...\n")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: REWARDS.load("./slow.py:score", tmp_path), range(4)))
    assert len(set(found)) == 1
