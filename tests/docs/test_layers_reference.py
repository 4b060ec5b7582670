"""The table of layers in CONTRIBUTING.md is that of the import contracts."""

from __future__ import annotations

import subprocess
import sys

from scripts import layers_reference
from tests.support.command_line import CHECKOUT


def test_the_table_is_up_to_date() -> None:
    script = CHECKOUT / "scripts" / "layers_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_and_module_is_in_a_layer_and_has_a_sentence() -> None:
    for package, layers in layers_reference.layers_of_packages().items():
        names = {name for layer in layers for name in layer}
        entries = [
            path for path in (CHECKOUT / package).iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"
        ]
        assert names == {path.stem for path in entries} - {"__init__"}
        assert all(layers_reference.first_sentence(package, name) for name in names)
