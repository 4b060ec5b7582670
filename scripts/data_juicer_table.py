"""Write docs/reference/data-juicer.md: every operator of the installed Data-Juicer, and what became of it when it was tried.

Each operator is run as a stage over a small batch of texts, images, sounds and videos, in a process of its own with a time limit
and without network. What was found is kept in a file (`--results`), so that an interrupted run goes on where it was; `--only NAME` tries
some again, `--render` writes the page from what is there. Run it when py-data-juicer or what is installed beside it changes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import time
import traceback
import wave
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from operators.base import BATCH_SCHEMA
from operators.build import build_chain
from operators.chain import Chain
from operators.data_juicer.columns import column_name
from operators.data_juicer.index import index
from operators.data_juicer.runtime import version
from operators.data_juicer.source import facts, stat_type
from rftdata.errors import ConfigError, PluginError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "data-juicer.md"
LIMIT_S = 90.0

TEXTS = [
    "The quick brown fox jumps over the lazy dog near the river bank. It was a sunny day in May 2024.",
    "<p>Mail me: someone@example.com or see https://example.com/page</p> 192.168.0.1",
    "今天天气很好，我们去公园散步吧。他说：你好！",
    "\\\\section{One} \\\\newcommand{\\\\x}{y} % comment\n\\\\x and more\n| a | b |\n| 1 | 2 |\n",
    "<table><tr><td>a</td><td>b</td></tr></table> // Copyright 2020 by nobody\ncode()",
    # Without these marks operators of several media pass a text over.
    "<__dj__image> a picture of a fox <__dj__video> a film of a dog <__dj__audio> a sound <|__dj__eoc|>",
]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "specified_field_filter": {"field_key": "finish_reason", "target_value": ["stop"]},
    "specified_numeric_field_filter": {"field_key": "num_response_tokens", "min_value": 1},
    "general_field_filter": {"filter_condition": "num_response_tokens > 3"},
    "frequency_specified_field_selector": {"field_key": "taskset", "topk": 1},
    "range_specified_field_selector": {"field_key": "num_response_tokens", "lower_rank": 1, "upper_rank": 3},
    "tags_specified_field_selector": {"field_key": "finish_reason", "target_tags": ["stop"]},
    "topk_specified_field_selector": {"field_key": "num_response_tokens", "topk": 2},
    "random_selector": {"select_num": 2},
    "image_ohem_selector": {"topk": 2},
    "suffix_filter": {},
    "text_chunk_mapper": {"max_len": 1000},
    "replace_content_mapper": {"pattern": "fox", "repl": "cat"},
    "python_lambda_mapper": {"lambda_str": "lambda row: {**row, 'response': row['response'].lower()}"},
    "python_file_mapper": {"file_path": "{folder}/mapper.py", "function_name": "process"},
    "remove_words_with_incorrect_substrings_mapper": {"substrings": ["http"]},
    "text_pair_similarity_filter": {"text_key_second": "prompt"},
    "llm_condition_filter": {"condition": "it is about a fox"},
    "dialog_intent_detection_mapper": {"history_key": "metadata.history"},
    "llm_extract_mapper": {"input_keys": ["response"], "output_schema": {"topic": "what it is about"}},
    "video_split_by_duration_mapper": {"split_duration": 100, "save_dir": "{folder}"},
    "image_blur_mapper": {"save_dir": "{folder}"},
    "video_resize_aspect_ratio_mapper": {"save_dir": "{folder}"},
    "video_resize_resolution_mapper": {"save_dir": "{folder}", "min_width": 16},
    "download_file_mapper": {"download_field": "source", "save_dir": "{folder}"},
}
"""Arguments for operators that do nothing without."""

HISTORY = [["What is 2 + 2?", "4"], ["And 3 + 3?", "6"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / f"data-juicer-{version()}.json")
    parser.add_argument("--only", nargs="*", default=None, help="operators to try (again)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop trying after so long")
    parser.add_argument("--render", action="store_true", help="write the page from what is there")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.render:
        names = options.only or [name for name in sorted(index()) if name not in results]
        _try_all(names, results, options.results, options.seconds)
    left = sorted(set(index()) - set(results))
    if left:
        print(f"{len(left)} operators are left to try: {', '.join(left[:5])}, …")
        return 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(results), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def _try_all(names: list[str], results: dict[str, Any], file: Path, seconds: float) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ |= {"OPENAI_API_KEY": "none", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "UV_OFFLINE": "1"}
    folder = Path(tempfile.mkdtemp(prefix="data-juicer-"))
    try:
        os.environ["DATA_JUICER_CACHE_HOME"] = str(folder / "cache")
        table = make_batch(folder)
        build_chain(
            [{"text_length_filter": {}}]
        ).prepare()  # imports Data-Juicer once, for all the processes forked below
        started = time.monotonic()
        for number, name in enumerate(names, start=1):
            if time.monotonic() - started > seconds:
                break
            results[name] = try_in_process(name, table, folder)
            file.write_text(json.dumps(results, indent=1, sort_keys=True))
            print(
                f"{number}/{len(names)} {name}: {results[name]['outcome']} {results[name].get('detail', '')}"[:200],
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_in_process(name: str, table: pa.Table, folder: Path) -> dict[str, Any]:
    """What becomes of an operator: `outcome`, `detail` and the seconds it took."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, table, folder, theirs), daemon=False)
    started = time.monotonic()
    process.start()
    theirs.close()
    found: dict[str, Any] = {"outcome": "fails", "detail": f"not done after {LIMIT_S:.0f} s"}
    if ours.poll(LIMIT_S):
        with contextlib.suppress(EOFError):
            found = ours.recv()
            process.join(5)
        if "seconds" not in found and found["detail"].startswith("not done"):
            found["detail"] = "its process died"
    if process.is_alive():
        process.kill()
    process.join()
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def _child(name: str, table: pa.Table, folder: Path, pipe: Connection) -> None:
    os.chdir(folder)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    asked: list[str] = []
    if not name.startswith("ray_"):
        _without_network(asked)
        sys.addaudithook(_only_media_tools)
    chain: Chain | None = None
    try:
        arguments = json.loads(json.dumps(ARGUMENTS.get(name, {})).replace("{folder}", str(folder)))
        chain = build_chain([{name: arguments}], schema=table.schema)
        chain.prepare()
        found = {"outcome": _ran(name, chain, table, asked), "detail": ""}
    except Exception as error:  # noqa: BLE001 - whatever an operator raises is what is looked for
        found = _explained(name, error, asked, chain is not None)
    else:
        if asked:
            asks = facts(name).asks
            found = {"outcome": "endpoint" if asks else "download", "detail": "" if asks else asked[0]}
    pipe.send(found)
    pipe.close()
    os._exit(0)


def _only_media_tools(event: str, args: tuple[Any, ...]) -> None:
    """Refuse every program but those that read and write sounds and videos: nothing that is tried here may change the machine."""
    if event in ("subprocess.Popen", "os.system"):
        command = args[1] if event == "subprocess.Popen" else args[0]
        first = command.split()[0] if isinstance(command, str) else str(command[0])
        if not Path(first).name.startswith(("ffmpeg", "ffprobe")):
            raise OSError(f"no other programs here (asked for {command})")


def _without_network(asked: list[str]) -> None:
    """Refuse every connection to another machine, and remember what was asked for."""

    def refuse(host: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(str(host))
        raise OSError(f"no network here (asked for {host})")

    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            refuse(address)
        connect(self, address)

    socket.getaddrinfo = refuse  # type: ignore[assignment]
    socket.socket.connect = connect_locally  # type: ignore[method-assign,assignment]


def _ran(name: str, chain: Chain, table: pa.Table, asked: list[str]) -> str:
    """Whether an operator that raised nothing did something; an endpoint that gave nothing is added to `asked`."""
    seen: list[tuple[pa.Table, pa.Table, pa.Array]] = []
    chain.run(table, watch=lambda _, before, after, outcome: seen.append((before, after, outcome.reasons)))
    ((before, after, reasons),) = seen
    column = chain.stages[0].operator.error_column
    if column and all(after[column].to_pylist()):
        asked.append("nothing")
    decides = index()[name].kind != "mapper" and not facts(name).stats
    acted = decides or reasons.null_count < len(reasons) or _found_something(before, after)
    return "runs" if acted else "idle"


def _found_something(before: pa.Table, after: pa.Table) -> bool:
    """Whether a column changed, or one was added that holds more than nothing."""
    for name in after.column_names:
        if name in before.column_names:
            if not after[name].equals(before[name]):
                return True
        elif any(value not in (None, "", "[]", "{}", []) for value in after[name].to_pylist()):
            return True
    return False


_DOWNLOADS = re.compile(
    r"no network|no other programs|offline|huggingface|hf\.co|couldn't connect|download|LocalEntryNotFound|Connection ?Error|modelscope",
    re.IGNORECASE,
)


def _explained(name: str, error: BaseException, asked: list[str], built: bool) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    whole = "".join(traceback.format_exception(error))
    if "those that make other rows" in text:
        return {"outcome": "other rows", "detail": ""}
    package = re.search(r"needs the package (.+?), which", text)
    if package:
        return {"outcome": "package", "detail": package[1]}
    module = re.search(r"No module named '(\w+)", whole)
    if module and importlib.util.find_spec(module[1]) is None:
        return {"outcome": "package", "detail": module[1]}
    if facts(name).asks and (asked or "api_key" in whole or "got no answer" in text):
        return {"outcome": "endpoint", "detail": ""}
    if asked or _DOWNLOADS.search(whole):
        return {"outcome": "download", "detail": _what_is_downloaded(name, whole)}
    if (isinstance(error, ConfigError | PluginError) and not built) or "refuses the arguments" in text:
        return {"outcome": "input", "detail": _short(getattr(error, "what", text))}
    what = _short(str(getattr(error, "what", text)))
    lacking = re.match(r"KeyError: '(\w+)'", what)
    if lacking:
        return {"outcome": "input", "detail": f"no {lacking[1]} in the batch"}
    return {"outcome": "fails", "detail": what}


def _what_is_downloaded(name: str, text: str) -> str:
    models = [
        value
        for value in facts(name).defaults.values()
        if isinstance(value, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", value)
    ]
    named = re.search(r"https?://[^\s'\")]+", text)
    return models[0] if models else (named[0] if named else "")


def _short(text: str) -> str:
    text = re.sub(r"stage 1 of the pipeline \(\w+\)( failed on a batch of \d+ rows)?: ", "", " ".join(text.split()))
    text = re.sub(r"/\S*/", "…/", text)
    return text if len(text) <= 140 else text[:139] + "…"


def make_batch(folder: Path) -> pa.Table:
    """Six rows with texts, and an image, a sound and a video each."""
    images, sound, video = _images(folder), _sound(folder), _video(folder)
    (folder / "mapper.py").write_text("def process(sample):\n    return {**sample, 'response': 'x'}\n")
    num_rows = len(TEXTS)
    metadata = [
        json.dumps(
            {
                "images": [images[row % len(images)]] * (1 + (row < num_rows - 1)),
                "audios": [sound],
                "videos": [video],
                "history": HISTORY,
            }
        )
        for row in range(num_rows)
    ]
    messages = json.dumps([{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}])
    values: dict[str, list[Any]] = {
        "experience_id": list(range(num_rows)),
        "group_id": [0] * num_rows,
        "rollout_index": list(range(num_rows)),
        "taskset": ["sums"] * num_rows,
        "answer": ["4"] * num_rows,
        "prompt": ["What is 2 + 2, and why?"] * num_rows,
        "response": TEXTS,
        "reward": [1.0] * num_rows,
        "num_response_tokens": list(range(num_rows)),
        "finish_reason": ["stop", "length"] * (num_rows // 2),
        "source": ["explorer"] * num_rows,
        "messages": [messages] * num_rows,
        "metadata": metadata,
    }
    schema = pa.schema([field for field in BATCH_SCHEMA if field.name in values])
    return pa.table({name: pa.array(values[name], schema.field(name).type) for name in schema.names}, schema=schema)


def _images(folder: Path) -> list[str]:
    from PIL import Image, ImageDraw

    paths = []
    for number, size in enumerate([(64, 48), (48, 64), (64, 64)]):
        image = Image.new("RGB", size, (40 * number, 120, 200))
        ImageDraw.Draw(image).ellipse((8, 8, 40, 40), fill="white", outline="black")
        paths.append(str(folder / f"{number}.png"))
        image.save(paths[-1])
    return paths


def _sound(folder: Path) -> str:
    path = folder / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(i / 12))) for i in range(16_000)))
    return str(path)


def _video(folder: Path) -> str:
    import cv2
    import numpy as np

    path = folder / "video.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 48))  # type: ignore[attr-defined]
    for number in range(20):
        frame = np.full((48, 64, 3), 5 * number, np.uint8)
        frame[10:20, number : number + 10] = 255
        writer.write(frame)
    writer.release()
    return str(path)


SAYS = {
    "runs": "runs offline",
    "idle": "runs offline, found nothing to do",
    "package": "needs a package",
    "download": "needs a download",
    "endpoint": "needs an endpoint",
    "input": "needs other input",
    "other rows": "makes other rows",
    "fails": "does not run here",
}

HEADER = """\
# The operators of Data-Juicer

Generated by `scripts/data_juicer_table.py`; do not edit. Every operator of py-data-juicer {version} was tried as a stage over a small batch of
texts, images, a sound and a video, without network, with what `constraints.txt` installs. [How to use them](../how-to/use-data-juicer.md).

{counts}

- *found nothing to do*: it went through the batch without an error and changed nothing; some want the tags of another operator first.
- *needs a package*: `pip install` it; py-data-juicer's extra in brackets names it too, but pins versions that differ from ours. More may be
  missing behind the first.
- *needs a download*: it fetches a model or a word list when it is first used; no result without network.
- *needs an endpoint*: by default it asks an OpenAI-compatible endpoint (`OPENAI_BASE_URL`, `OPENAI_API_KEY`).
- *needs other input*: the batch has no such column; what is missing is said.
- *makes other rows*: no stage; run it in a Data-Juicer job of its own before the tasks are loaded.

`columns` are what a filter or a tagging mapper finds out, with the default prefix; with † they are stored as scores.
"""


def render(results: dict[str, Any]) -> str:
    """The page."""
    from operators.data_juicer.runtime import _extras_with

    outcomes = [results[name]["outcome"] for name in index()]
    counts = ", ".join(f"{words}: {outcomes.count(key)}" for key, words in SAYS.items() if key in outcomes)
    parts = [HEADER.format(version=version(), counts=f"{len(outcomes)} operators; {counts}.")]
    for kind in dict.fromkeys(one.kind for one in index().values()):
        parts += [f"## {kind.capitalize()}s\n", "| operator | tried | columns |", "| --- | --- | --- |"]
        for name in sorted(name for name, one in index().items() if one.kind == kind):
            found = results[name]
            detail = found.get("detail", "").replace("|", "\\|")
            if found["outcome"] == "package":
                extras = _extras_with(detail)
                detail = f"`{detail}`" + (f" ({extras[0]})" if extras else "")
            says = SAYS[found["outcome"]] + (f": {detail}" if detail else "")
            parts.append(f"| `{name}` | {says} | {_columns(name)} |")
        parts.append("")
    return "\n".join(parts)


def _columns(name: str) -> str:
    known = facts(name)
    if known.kind == "filter":
        shown = [f"`{column_name('dj_', stat)}` {_type(stat)}" for stat in known.stats]
    else:
        shown = [f"`{column_name('dj_', meta)}`" for _, meta in known.metas] if known.kind == "mapper" else []
    stored = known.splits or (known.kind == "mapper" and bool(known.metas) and not known.rewrites)
    return ", ".join(shown) + (" †" if shown and stored else "")


def _type(stat: str) -> str:
    kind = stat_type(stat)
    return {"double": "number", "string": "text", "bool": "true/false"}.get(str(kind), "numbers")


if __name__ == "__main__":
    sys.exit(main())
