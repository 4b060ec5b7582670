"""The vectors that stages of a task pipeline ask for: stored ones, and those of new texts, which are computed and stored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rftcore.task_pipeline.encoder import Encoder, encoder_name
from rftdata.buffer import Buffer
from rftdata.tasks.embeddings import known_vectors, store_vectors

_PORTION = 2048


class TaskEmbeddings:
    """Returns vectors of tasks' texts; see `operators.base.Embed`.

    Args:
        policy: the run's model, used as the encoder if a stage names none.
        base_dir: folder to which an encoder's relative path refers.
        keep: whether new vectors are stored.
    """

    def __init__(self, buffer: Buffer, policy: str, base_dir: Path, *, keep: bool = True) -> None:
        self._database = buffer.database
        self._policy = policy
        self._base_dir = base_dir
        self._keep = keep
        self.kept_as: str | None = None

    def __call__(
        self, model: str | None, max_tokens: int, task_ids: Sequence[int], texts: Sequence[str]
    ) -> NDArray[np.float32]:
        """Return one vector per text, [texts, dimensions].

        Raises:
            ModelError: the encoder cannot be found or opened.
        """
        path = model or self._policy
        if path.startswith((".", "/")):
            path = str(self._base_dir / path)
        name = encoder_name(path, max_tokens)
        vectors_by_place = known_vectors(self._database, name, task_ids, texts)
        missing = [place for place in range(len(texts)) if place not in vectors_by_place]
        if missing:
            encoder = Encoder(path, max_tokens)
            for start in range(0, len(missing), _PORTION):
                places = missing[start : start + _PORTION]
                vectors = encoder.encode([texts[place] for place in places])
                if self._keep:
                    # Portion by portion, so that an interrupted computation continues where it stopped.
                    self.kept_as = store_vectors(
                        self._database,
                        name,
                        [task_ids[place] for place in places],
                        [texts[place] for place in places],
                        vectors,
                    )
                vectors_by_place.update(zip(places, vectors))
            kept = f", kept as {self.kept_as}" if self._keep else ""
            print(f"tasks: {len(missing):,} texts encoded by {name}{kept}", file=sys.stderr, flush=True)
        return (
            np.stack([vectors_by_place[place] for place in range(len(texts))])
            if texts
            else np.zeros((0, 1), np.float32)
        )
