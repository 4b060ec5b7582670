"""Try one operator of Data-Juicer as a stage: over a small batch of texts, images, a sound and a video, in a separate process.

Nothing that is tried may change the machine or reach another one: every program but those for media is refused, and so is every
connection. Mappers that make rows, groupers and aggregators are tried on tasks, the others on experiences.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import socket
import struct
import sys
import time
import traceback
import wave
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from operators.base import BATCH_SCHEMA
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.data_juicer.catalogue import facts
from rftdata.errors import ConfigError, PluginError
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA

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
    "nested_aggregator": {"input_key": "prompt"},
    "entity_attribute_aggregator": {"input_key": "prompt", "entity": "fox", "attribute": "colour"},
    "most_relevant_entities_aggregator": {"input_key": "prompt", "entity": "fox", "query_entity_type": "animal"},
    "meta_tags_aggregator": {"meta_tag_key": "taskset"},
    "download_file_mapper": {"download_field": "source", "save_dir": "{folder}"},
}
"""Arguments for operators that do nothing without them."""

HISTORY = [["What is 2 + 2?", "4"], ["And 3 + 3?", "6"]]


def try_in_process(name: str, table: pa.Table, folder: Path) -> dict[str, Any]:
    """Return what trying an operator led to: `outcome`, `detail` and seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, table, folder, theirs), daemon=False)
    started = time.monotonic()
    process.start()
    theirs.close()
    result: dict[str, Any] = {"outcome": "fails", "detail": f"not done after {LIMIT_S:.0f} s"}
    if ours.poll(LIMIT_S):
        with contextlib.suppress(EOFError):
            result = ours.recv()
            process.join(5)
        if "seconds" not in result and result["detail"].startswith("not done"):
            result["detail"] = "its process ended"
    if process.is_alive():
        process.kill()
    process.join()
    return {**result, "seconds": round(time.monotonic() - started, 1)}


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
        if _is_of_tasks(name):
            table = as_tasks(table)
        before = ["naive_grouper"] if facts(name).kind == "aggregator" or name == "naive_reverse_grouper" else []
        chain = build_chain([*before, {name: arguments}], schema=table.schema, require_reward=False)
        chain.prepare()
        result = {"outcome": _ran(name, chain, table, asked), "detail": ""}
    except Exception as error:  # noqa: BLE001 - every error of an operator is a result
        result = _explained(name, error, asked, chain is not None)
    else:
        if asked:
            asks = facts(name).asks
            result = {"outcome": "endpoint" if asks else "download", "detail": "" if asks else asked[0]}
    pipe.send(result)
    pipe.close()
    os._exit(0)


def _only_media_tools(event: str, args: tuple[Any, ...]) -> None:
    """Refuse every program except those that read and write sounds and videos, so that no trial changes the machine."""
    if event in ("subprocess.Popen", "os.system"):
        command = args[1] if event == "subprocess.Popen" else args[0]
        first = command.split()[0] if isinstance(command, str) else str(command[0])
        if not Path(first).name.startswith(("ffmpeg", "ffprobe")):
            raise OSError(f"no other programs here (asked for {command})")


def _without_network(asked: list[str]) -> None:
    """Refuse every connection to another machine, and record the request."""

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
    """Return whether an operator that raised nothing did anything; add an endpoint without an answer to `asked`."""
    seen: list[tuple[pa.Table, pa.Table, pa.Array]] = []
    chain.run(table, watch=lambda _, before, after, outcome: seen.append((before, after, outcome.reasons)))
    *_, (before, after, reasons) = seen
    column = chain.stages[-1].operator.error_column
    if column and all(after[column].to_pylist()):
        asked.append("nothing")
    decides = facts(name).kind != "mapper" and not facts(name).stats
    acted = decides or reasons.null_count < len(reasons) or _found_something(before, after)
    return "runs" if acted else "idle"


def _found_something(before: pa.Table, after: pa.Table) -> bool:
    """Return whether a column changed, or a column with values was added."""
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
    if "works on a whole data set of Ray's" in text:
        return {"outcome": "data set", "detail": ""}
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
    """Return six rows with texts, each with an image, a sound and a video."""
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


def _is_of_tasks(name: str) -> bool:
    return facts(name).makes_rows or facts(name).kind in ("grouper", "aggregator")


def as_tasks(table: pa.Table) -> pa.Table:
    """Return the same texts as prompts of tasks."""
    rows = table.num_rows
    values = {
        **{name: table[name].to_pylist() for name in table.column_names},
        "prompt": table["response"].to_pylist(),
        "group_id": list(range(rows)),
        "task_id": list(range(rows)),
        "task_key": [f"t{row}" for row in range(rows)],
    }
    arrays = [pa.array(values.get(field.name, [None] * rows), field.type) for field in TASK_BATCH_SCHEMA]
    return pa.table(arrays, schema=TASK_BATCH_SCHEMA)


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
