"""Labels that judging stages suggest: their new scores become annotations of the source `judge`, for people to accept or correct.

They are stored before the verdicts. Each has a key made of the score's key and its input, so a worker that is killed in between suggests nothing
twice. A suggestion reopens nothing, and no column counts it as a person's.
"""

from __future__ import annotations

from collections.abc import Sequence

from operators.chain.chain import Chain
from operators.chain.stage import Stage
from operators.llm.judge import Judge
from rftdata.annotations import Annotation, LabelKind, annotate, kinds
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError, ConfigError, DiskFullError, RftError
from rftdata.pipeline.records import StageRun
from rftdata.pipeline.scores import StageScores


def check_suggestions(buffer: Buffer, chain: Chain) -> dict[str, tuple[Stage, LabelKind]]:
    """Return the stages that suggest labels, each with its kind, by the key of their scores.

    Raises:
        ConfigError: a judge suggests a kind that does not exist, is not about experiences, or has a type that it cannot suggest.
    """
    suggesting = {
        stage.score_key: (stage, stage.operator.config.suggests)
        for stage in chain.stages
        if isinstance(stage.operator, Judge) and stage.operator.config.suggests is not None
    }
    known = {kind.kind: kind for kind in kinds(buffer)} if suggesting else {}
    return {key: (stage, _kind(stage, name, known)) for key, (stage, name) in suggesting.items()}


class Suggestions:
    """Stores what the judges of a chain suggest.

    Args:
        policy: name of the policy, for judges that ask it.

    Raises:
        ConfigError: see `check_suggestions`.
    """

    def __init__(self, buffer: Buffer, chain: Chain, policy: str) -> None:
        self._buffer, self._policy = buffer, policy
        self._stages = check_suggestions(buffer, chain)

    def store(self, scores: Sequence[StageScores]) -> list[StageRun]:
        """Store what new scores suggest. A suggestion that is refused is returned as an error, and the others are stored."""
        refused = []
        for found in scores:
            if found.score_key not in self._stages:
                continue
            stage, kind = self._stages[found.score_key]
            suggested = self._annotations(found, stage, kind)
            try:
                self._annotate(suggested)
            except (BufferUnavailableError, DiskFullError):
                raise
            except RftError:
                refused += [error for one in suggested if (error := self._refusal(stage, one)) is not None]
        return refused

    def _annotations(self, found: StageScores, stage: Stage, kind: LabelKind) -> list[Annotation]:
        judge = stage.operator
        assert isinstance(judge, Judge)
        endpoint = judge.config.endpoint
        annotations = []
        for experience_id, scores, error, digest in found.rows():
            suggestion = None if error is not None else judge.suggestion(scores, kind.type)
            if suggestion is not None:
                key = None if digest is None else f"{found.score_key}/{experience_id}/{digest}"
                annotations.append(
                    Annotation(
                        kind.kind,
                        experience_id,
                        suggestion.value,
                        reason=suggestion.reason,
                        confidence=suggestion.confidence,
                        model=self._policy if endpoint == "policy" else endpoint.model,
                        key=key,
                        author=stage.name,
                    )
                )
        return annotations

    def _annotate(self, annotations: Sequence[Annotation]) -> None:
        if annotations:
            annotate(self._buffer, annotations, author="pipeline", source="judge")

    def _refusal(self, stage: Stage, annotation: Annotation) -> StageRun | None:
        """Store one suggestion; return the error if it is refused."""
        try:
            self._annotate([annotation])
        except (BufferUnavailableError, DiskFullError):
            raise
        except RftError as error:
            return StageRun(stage.name, stage.index, 1, 1, 0, 0.0, error=f"the suggestion is refused: {error}"[:500])
        return None


def _kind(stage: Stage, name: str, known: dict[str, LabelKind]) -> LabelKind:
    """Return the kind that a stage suggests."""
    assert isinstance(stage.operator, Judge)
    kind = known.get(name)
    where = f"stage {stage.index} of the pipeline ({stage.name})"
    if kind is None:
        raise ConfigError(
            f"{where} suggests a kind of label that does not exist",
            value=name,
            allowed=", ".join(known) or "no kind is defined yet",
            todo="define it under labels.kinds or with `rft label kind define`",
        )
    if kind.target != "experience" or kind.type not in stage.operator.suggested_types:
        raise ConfigError(
            f"{where} cannot suggest the kind of label {name!r}",
            value=f"{kind.type} about {kind.target}",
            allowed=f"{' or '.join(sorted(stage.operator.suggested_types))} about experience",
            todo="suggest another kind",
        )
    return kind
