"""Labels of every kind: thumbs, numbers, choices, tags, rubrics, critiques, edits, rankings, spans and turns.

A kind (`LabelKind`) says which values it has and what it is about: an experience, a rollout, a group or a task. An annotation is one value by
one author. Annotations are append-only; what stands, and every rule about values, targets, versions and rights, is the database's
(sql/migrations/versions/0004_labels/), so that SQL, Python, files and pages obey the same ones. The reward is a label of its own kind: see
`rftdata.labels`, whose `undo` undoes batches of both.
"""

from __future__ import annotations

from rftdata.annotations.annotation import Annotation, AnnotationBatch, annotate, history, standing, undo_key
from rftdata.annotations.kinds import LabelKind, define_kinds, kinds, retire_kind

__all__ = [
    "Annotation",
    "AnnotationBatch",
    "LabelKind",
    "annotate",
    "define_kinds",
    "history",
    "kinds",
    "retire_kind",
    "standing",
    "undo_key",
]
