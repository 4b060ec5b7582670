"""GSM8K (arXiv 2110.14168): 7,473 training and 1,319 test questions with worked solutions that end in `#### ANSWER`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rftdata.errors import TaskSourceError

_FOLDER = Path(__file__).resolve().parent


def gsm8k(split: str = "train", path: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the questions of a split with their answers.

    Args:
        split: train or test.
        path: a .jsonl or .parquet file, or a folder with files whose names begin with the split, such as a copy of the data set's
            repository; relative to this file. By default `openai/gsm8k` of the Hugging Face hub, or of its cache.

    Raises:
        TaskSourceError: the data are not there.
    """
    for row in _from_hub(split) if path is None else _from_files(_FOLDER / path, split):
        solution, mark, answer = str(row["answer"]).rpartition("####")
        if not mark:
            raise TaskSourceError(
                f"a solution has no answer after '####': {str(row['answer'])[-200:]!r}", todo="correct the file"
            )
        yield {"question": row["question"], "answer": answer.strip(), "solution": solution.strip()}


def _from_hub(split: str) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        found = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:
        raise TaskSourceError(
            f"openai/gsm8k is not available from the Hugging Face hub: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            todo="copy its files to this machine, and name their folder: args: {split: train, path: FOLDER}",
        ) from error
    yield from found


def _from_files(place: Path, split: str) -> Iterator[dict[str, Any]]:
    files = sorted(place.rglob(f"{split}*")) if place.is_dir() else [place]
    files = [file for file in files if file.is_file() and file.suffix in (".jsonl", ".parquet")]
    if not files:
        raise TaskSourceError(
            f"there are no questions of GSM8K in {place}",
            allowed=f"a .jsonl or .parquet file, or a folder with {split}*.jsonl or {split}*.parquet",
            todo="correct args.path; it is relative to tasks.py",
        )
    for file in files:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            yield from pq.read_table(file).to_pylist()
        else:
            with file.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
