"""Installs into a real environment from a folder of wheels, with uv and with pip, and without any index."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rftcore.installation.installer import (
    Installer,
    InstallError,
    has_own_source,
    left_out,
    pip_settings,
    uv_environment,
)

CHECKOUT = Path(__file__).resolve().parents[3]


def write_wheel(folder: Path, name: str, requires: tuple[str, ...] = ()) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in requires)]
        )
        + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with `engine`, which requires torchvision, as the only source of packages; uv is not on the path."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "engine", ("torchvision",))
    write_wheel(folder, "torchvision")
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    # The last configuration file that pip reads wins: a constraint of the whole machine must not reach these wheels.
    (tmp_path / "none.txt").touch()
    settings = f"[global]\nno-index = true\nfind-links = {folder}\nconstraint = {tmp_path / 'none.txt'}\n"
    (tmp_path / "pip.conf").write_text(settings, encoding="utf-8")
    monkeypatch.setenv("PATH", os.defpath)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter with pip alone; tests remove what they installed."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    return environment / "bin" / "python"


def installed(python: Path) -> set[str]:
    command = [python, "-m", "pip", "list", "--format", "freeze"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.partition("=")[0] for line in lines} - {"pip", "setuptools"}


@pytest.mark.long
@pytest.mark.parametrize("with_uv", [True, False], ids=["uv", "pip"])
def test_on_cpu_the_packages_of_the_overrides_are_left_out(
    with_uv: bool,
    wheels: Path,
    python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if with_uv:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.defpath}")
    Installer(python).install(["engine"], ["cpu"], dry_run=True)
    assert installed(python) == set()
    Installer(python).install(["engine"], ["cpu"])
    assert installed(python) == {"engine"}
    assert ("uv --override overrides.txt" in capfd.readouterr().out) == with_uv
    Installer(python).uninstall(["engine"])
    assert installed(python) == set()


def test_where_nothing_can_be_installed_the_command_is_named(wheels: Path, python: Path) -> None:
    with pytest.raises(InstallError, match="no-such-package"):
        Installer(python).install(["no-such-package"], ["cuda"])


def test_settings_of_pip_reach_uv_unless_it_has_its_own(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pip_settings(Path(sys.executable))
    assert settings["find-links"] == [str(wheels)]
    assert uv_environment(settings)["UV_FIND_LINKS"] == str(wheels)
    assert has_own_source(uv_environment(settings)) and not has_own_source(uv_environment({}))
    assert uv_environment(settings)["UV_COMPILE_BYTECODE"] == "1"
    monkeypatch.setenv("UV_COMPILE_BYTECODE", "0")
    assert uv_environment(settings)["UV_COMPILE_BYTECODE"] == "0"
    monkeypatch.setenv("UV_FIND_LINKS", "/elsewhere")
    assert uv_environment(settings)["UV_FIND_LINKS"] == "/elsewhere"


def test_the_packages_that_break_cpu_torch_are_left_out() -> None:
    assert {"torchvision", "torchaudio", "torchcodec"} <= set(left_out())


def test_the_installer_imports_only_the_standard_library() -> None:
    # -S: no site-packages, as in the interpreter that starts scripts/set_up.py.
    program = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); import rftcore.installation.installer, rftcore.installation.imports"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)
