"""Kinds of labels whose annotations answer reviews (`human_review` with `kind`), checked before a run starts."""

from __future__ import annotations

from operators.chain.chain import Chain
from operators.experience.human_review import HumanReview
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError
from rftdata.reviews import problem_of_panel


def check_panels(buffer: Buffer, chain: Chain) -> None:
    """Refuse stages that ask people for labels of a kind which cannot answer a review.

    Raises:
        ConfigError: the kind does not exist, was retired, is not about experiences, or its type or choices do not fit; names the stage and all kinds.
    """
    for stage in chain.stages:
        if not isinstance(stage.operator, HumanReview) or stage.operator.config.kind is None:
            continue
        config = stage.operator.config
        problem, known = problem_of_panel(buffer, config.kind, config.decide, config.passing)
        if problem is not None:
            raise ConfigError(
                f"the stage {stage.name!r} asks people with a kind of label that {problem}",
                value=config.kind,
                allowed=known or "no kind is defined yet",
                todo="correct the stage, or define the kind under labels.kinds or with `rft label kind define`; nothing was stored",
            )
