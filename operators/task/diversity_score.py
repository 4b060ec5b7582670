"""How unlike the others of its taskset a task is: the columns and features `diversity` and `nearest_similarity`, in [0, 1].

    similarity(a, b)   = max(0, cos(v_a − m, v_b − m))
    diversity          = 1 − mean similarity to the `neighbours` nearest tasks of the set
    nearest_similarity = similarity to the nearest one

v is the vector of a prompt by an encoder. `embedding: {model: …}` names one on the Hugging Face hub or a folder; its last hidden
states are averaged over the tokens. By default the policy model (model.path) is the encoder. m is the mean vector of the
set. With `center` it is subtracted, because the states of a language model share a large common part that carries no information
about the text (Mu and Viswanath, arXiv 1702.01417, without their principal components). A sentence encoder does well without it.

Vectors are stored in `rft.task_embedding` and computed once per text. The neighbours are exact up to `max_compared` tasks. In a
larger set every task is compared with that many tasks, the same for all, selected by a hash of the task's key. Two equivalent tasks
both have a nearest_similarity near 1; to drop all but the first of them, use a deduplicator.

    - diversity_score: {}
    - diversity_score: {embedding: {model: sentence-transformers/all-MiniLM-L6-v2}, neighbours: 10, center: false}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pydantic import Field

from operators.base import Embed, Operator, StageConfig, StageContext, StageOutcome
from operators.task.numbers import as_array
from rftdata.errors import OperatorError

_BLOCK_ROWS = 1024


class EmbeddingConfig(StageConfig):
    """The model that turns prompts into vectors."""

    model: str | None = Field(
        None, description="An encoder's folder or its name on the hub; the policy model by default."
    )
    max_tokens: int = Field(512, ge=1, description="Longer prompts are truncated.")


class DiversityScore(Operator, revision=1):
    """Adds `diversity` and `nearest_similarity`; processes the whole set at once."""

    class Config(StageConfig):
        """How similarity is measured, and to how many tasks."""

        embedding: EmbeddingConfig = Field(EmbeddingConfig(), description="The encoder: {model: …, max_tokens: …}.")
        neighbours: int = Field(5, ge=1, description="Nearest tasks whose similarity is averaged.")
        center: bool = Field(True, description="Subtract the mean vector of the set first.")
        max_compared: int = Field(20_000, ge=2, description="Largest number of tasks that each task is compared with.")

    reads = frozenset({"prompt", "task_key"})
    writes = frozenset({"diversity", "nearest_similarity"})
    seconds_per_row = 1.0

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self._embed: Embed | None = None

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        schema = super().validate_schema(schema)
        for name in ("diversity", "nearest_similarity"):
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.float64()))
        return schema

    def prepare(self, context: StageContext) -> None:
        self._embed = context.embed

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._embed is None:
            raise OperatorError(
                "no encoder of texts is available here",
                todo="use diversity_score in pipelines.task, not in pipelines.experience",
            )
        texts = [text or "" for text in table["prompt"].to_pylist()]
        settings = self.config.embedding
        vectors = self._embed(settings.model, settings.max_tokens, table["experience_id"].to_pylist(), texts)
        compared = _compared(table["task_key"].to_pylist(), self.config.max_compared)
        mean, nearest = neighbour_similarities(vectors, compared, self.config.neighbours, self.config.center)
        return StageOutcome.keep_all(
            table.num_rows, {"diversity": as_array(1.0 - mean), "nearest_similarity": as_array(nearest)}
        )


def _compared(keys: Sequence[str], limit: int) -> NDArray[np.int64]:
    """Return the rows that all others are compared with: those with the smallest hashes. Most of them remain when the set grows."""
    if len(keys) <= limit:
        return np.arange(len(keys))
    hashes = np.array([xxhash.xxh3_64_intdigest(key.encode()) for key in keys], np.uint64)
    return np.sort(np.argpartition(hashes, limit)[:limit])


def neighbour_similarities(
    vectors: NDArray[np.float32], compared: NDArray[np.int64], neighbours: int, center: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean similarity to the nearest `neighbours`, and to the nearest, per row; both are 0 for the only row of a set.

    Args:
        vectors: [rows, dimensions].
        compared: rows that others are compared with.
    """
    rows = len(vectors)
    if center and rows > 1:
        vectors = vectors - vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(length, 1e-12)
    others = vectors[compared]
    column = np.full(rows, -1)
    column[compared] = np.arange(len(compared))
    mean, nearest = np.zeros(rows), np.zeros(rows)
    for start in range(0, rows, _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, rows))
        similarity = vectors[block] @ others.T
        own = column[block]
        inside = np.flatnonzero(own >= 0)
        similarity[inside, own[inside]] = -np.inf
        best = _largest(similarity, neighbours)
        has_neighbour = np.isfinite(best)
        best = np.where(has_neighbour, np.clip(best, 0.0, 1.0), 0.0)
        mean[block] = best.sum(axis=1) / np.maximum(has_neighbour.sum(axis=1), 1)
        nearest[block] = best.max(axis=1, initial=0.0)
    return mean, nearest


def _largest(similarity: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    if similarity.shape[1] <= count:
        return similarity
    return np.partition(similarity, similarity.shape[1] - count, axis=1)[:, -count:]
