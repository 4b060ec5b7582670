"""Drafts: what rollouts of unfinished groups have sampled so far. The buffer stores it, and the explorer that claims the group next continues it.

Every rollout samples through its own `RolloutDraft`. The workflow of a continued rollout runs from its beginning. A request equal to a
stored one (the same prompt, token by token, and the same sampling parameters) gets the stored answer, or continues after its last token.
Every other request is sampled as usual, so a rollout whose environment now answers differently uses only the answers that still fit.
Each token keeps its log-probability and the policy version that sampled it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rftcore.engines.answer_text import AnswerText
from rftcore.engines.base import Decoding, Engine, Generation
from rftcore.engines.token_reports import report_tokens
from rftdata.errors import EngineStoppedError, RftError
from rftdata.experience import AbandonedTry
from rftdata.planning.claims import ClaimedGroup
from rftdata.planning.partial import Part, PartialAnswer, keep
from rftdata.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Seconds between two saves of finished answers.
_FINISHED_S = 1.0
_names = itertools.count()


def input_digest(prompt_token_ids: list[int], decoding: Decoding) -> bytes:
    """Return the digest of a request."""
    digest = _digest_of(decoding).copy()
    digest.update(np.asarray(prompt_token_ids, np.int64).tobytes())
    return digest.digest()


@lru_cache(maxsize=64)
def _digest_of(decoding: Decoding) -> hashlib._Hash:
    return hashlib.sha256(repr(sorted(asdict(decoding).items())).encode())


@dataclass(eq=False)
class _Draft:
    """One answer: its tokens from an earlier claim, and what its request has sampled since.

    Attributes:
        name: of the open request in the engine.
        kept: tokens of an earlier claim, which the request continues.
        finished: the whole answer.
        stored: number of tokens in the buffer, under this claim or earlier ones.
        is_stored: whether the whole answer is in the buffer.
    """

    index: int
    digest: bytes
    kept: Generation
    name: str = field(default_factory=lambda: f"draft {next(_names)}")
    finished: Generation | None = None
    stored: int = 0
    is_stored: bool = False


class RolloutDraft:
    """The engine as one rollout uses it.

    Args:
        kept: answers that earlier claims sampled for this rollout.
    """

    def __init__(self, engine: Engine, index: int, kept: Iterable[PartialAnswer] = ()) -> None:
        self._engine = engine
        self._kept = {answer.generation_index: answer for answer in kept}
        self._num_kept = len(self._kept)
        self._next_index = max(self._kept, default=-1) + 1
        self.index = index
        self.answers: list[_Draft] = []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The engine's tokenizer."""
        return self._engine.tokenizer

    def begun_again(self, changing: Iterable[str]) -> AbandonedTry | None:
        """Return the answers of an earlier claim that were sampled again, with the cause, once the rollout has ended; None if none was.

        Args:
            changing: names of the environments that are not deterministic.
        """
        if not self._kept:
            return None
        names = ", ".join(map(repr, sorted(changing)))
        why = f"the environment {names} is not deterministic" if names else "the workflow made other requests"
        error = (
            f"its explorer was lost; {self._num_kept - len(self._kept)} of {self._num_kept} answers were taken over, and the others sampled again, "
            f"because {why}"
        )
        return AbandonedTry(error, [self._chat(self._kept[index]) for index in sorted(self._kept)])

    def _chat(self, answer: PartialAnswer) -> dict[str, Any]:
        """Return an answer as `rftdata.writing.chats` does. Its prompt was not kept."""
        text = AnswerText(self.tokenizer)(answer.token_ids, ended=answer.finish_reason == "stop")
        return {
            "messages": [{"role": "assistant", "content": text}],
            "fork": None,
            "role": None,
            "finish_reason": answer.finish_reason or "abort",
            "turns": [{"turn": answer.generation_index, "num_tokens": len(answer.token_ids)}],
        }

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        """Sample one response, or continue one; see `Engine.generate`."""
        draft = self._begin(prompt_token_ids, decoding)
        if draft.finished is None:
            kept = draft.kept
            report_tokens(kept.token_ids, decoding)
            rest = replace(decoding, max_tokens=decoding.max_tokens - len(kept.token_ids))
            sampled = await self._engine.generate_named(draft.name, [*prompt_token_ids, *kept.token_ids], rest)
            if sampled.finish_reason == "abort":
                return sampled
            draft.finished = self._joined(kept, sampled, decoding.stop) if kept.token_ids else sampled
        return draft.finished

    def _begin(self, prompt_token_ids: list[int], decoding: Decoding) -> _Draft:
        digest = input_digest(prompt_token_ids, decoding)
        answer = next((one for one in self._kept.values() if one.input_digest == digest), None)
        if answer is None:
            draft = _Draft(self._next_index, digest, _generation([], [], []))
            self._next_index += 1
        else:
            draft = self._take_up(self._kept.pop(answer.generation_index), decoding)
        self.answers.append(draft)
        return draft

    def _take_up(self, answer: PartialAnswer, decoding: Decoding) -> _Draft:
        if answer.finish_reason is not None:
            whole = _generation(answer.token_ids, answer.logprobs, answer.version_spans)
            text = self._text(whole, answer.finish_reason, decoding.stop)
            finished = replace(whole, text=text, finish_reason=answer.finish_reason)
            return _Draft(answer.generation_index, answer.input_digest, whole, finished=finished, is_stored=True)
        # The engine searches for stop texts in new tokens only, so tokens in which one may have begun are sampled again. A token may be one
        # byte of a character.
        length = len(answer.token_ids) - max((len(text.encode()) for text in decoding.stop), default=0)
        kept = _generation(answer.token_ids[: max(0, length)], answer.logprobs[: max(0, length)], answer.version_spans)
        return _Draft(answer.generation_index, answer.input_digest, kept, stored=len(kept.token_ids))

    def _joined(self, kept: Generation, sampled: Generation, stop: tuple[str, ...]) -> Generation:
        whole = _continued(kept, sampled)
        text = self._text(whole, sampled.finish_reason, stop)
        return replace(whole, text=text, finish_reason=sampled.finish_reason)

    def _text(self, whole: Generation, finish_reason: str, stop: tuple[str, ...]) -> str:
        return AnswerText(self.tokenizer)(whole.token_ids, ended=finish_reason == "stop", stop=stop)


class Drafts:
    """The drafts of the groups that one explorer holds. Call `save` in one thread at a time; rollouts may sample meanwhile.

    Args:
        keep_s: seconds from the claim of a group to its first save, and between two saves of unfinished answers. Finished answers of such
            groups are saved within a second, so that of rollouts of many turns no more than the open turn is lost.
    """

    def __init__(self, run: Run, engine: Engine, keep_s: float) -> None:
        self._run, self._engine, self._keep_s = run, engine, keep_s
        self._groups: dict[int, _GroupDraft] = {}
        self._saved_at = self._saved_finished_at = time.monotonic()

    def begin(self, claimed: ClaimedGroup, kept: Iterable[PartialAnswer] = ()) -> None:
        """Start the drafts of a claimed group."""
        self._groups[claimed.group_id] = _GroupDraft(claimed, list(kept))

    def rollout(self, group_id: int, index: int) -> RolloutDraft:
        """Return the draft through which a rollout of the group samples."""
        return self._groups[group_id].rollout(self._engine, index)

    def end(self, group_id: int) -> None:
        """Remove a group that is complete, or no longer held."""
        self._groups.pop(group_id, None)

    @property
    def is_due(self) -> bool:
        """Whether the next save is due."""
        if not self._groups or time.monotonic() - self._saved_finished_at <= min(_FINISHED_S, self._keep_s):
            return False
        return self._is_due_for_all or any(group.age_s > self._keep_s and group.has_finished for group in self._held())

    @property
    def _is_due_for_all(self) -> bool:
        return time.monotonic() - self._saved_at > self._keep_s

    def _held(self) -> list[_GroupDraft]:
        return list(self._groups.values())

    def save(self, *, all_groups: bool = False) -> int:
        """Store new tokens, those of unfinished answers every `keep_s`, and return their number. What cannot be stored now remains for the next save.

        Args:
            all_groups: also groups that were claimed a moment ago.
        """
        is_whole = all_groups or self._is_due_for_all
        self._saved_finished_at = time.monotonic()
        self._saved_at = self._saved_finished_at if is_whole else self._saved_at
        groups = [group for group in self._held() if all_groups or group.age_s > self._keep_s]
        open_drafts = [draft for group in groups for _, draft in group.drafts() if draft.finished is None and is_whole]
        try:
            unfinished = self._unfinished(open_drafts)
            news = [news for group in groups for news in group.news(unfinished)]
            if news:
                keep(self._run, [part for part, _, _ in news])
        except RftError as error:
            logger.warning("unfinished rollouts could not be kept: %s", error)
            return 0
        for part, draft, is_finished in news:
            draft.stored = part.first_token + len(part.answer.token_ids)
            draft.is_stored = is_finished
        return sum(len(part.answer.token_ids) for part, _, _ in news)

    def _unfinished(self, drafts: list[_Draft]) -> dict[str, Generation]:
        try:
            return self._engine.unfinished({d.name: d.stored - len(d.kept.token_ids) for d in drafts}) if drafts else {}
        except EngineStoppedError:
            return {}


@dataclass(eq=False)
class _GroupDraft:
    claimed: ClaimedGroup
    kept: list[PartialAnswer]
    rollouts: list[RolloutDraft] = field(default_factory=list)
    claimed_at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.claimed_at

    def rollout(self, engine: Engine, index: int) -> RolloutDraft:
        draft = RolloutDraft(engine, index, [answer for answer in self.kept if answer.rollout_index == index])
        self.rollouts.append(draft)
        return draft

    @property
    def has_finished(self) -> bool:
        """Whether a finished answer is not in the buffer yet."""
        return any(draft.finished is not None and not draft.is_stored for _, draft in self.drafts())

    def drafts(self) -> list[tuple[RolloutDraft, _Draft]]:
        return [(rollout, draft) for rollout in list(self.rollouts) for draft in list(rollout.answers)]

    def news(self, unfinished: dict[str, Generation]) -> list[tuple[Part, _Draft, bool]]:
        """Return the parts that are not stored yet, each with its draft and whether it completes the answer."""
        news = []
        for rollout, draft in self.drafts():
            finished, partial = draft.finished, unfinished.get(draft.name)
            if draft.is_stored:
                continue
            if finished is not None:
                new = replace(
                    finished, token_ids=finished.token_ids[draft.stored :], logprobs=finished.logprobs[draft.stored :]
                )
            elif partial is not None and partial.token_ids and partial.version_spans:
                new = replace(partial, version_spans=_continued(draft.kept, partial).version_spans)
            else:
                continue
            answer = PartialAnswer(
                rollout_index=rollout.index,
                generation_index=draft.index,
                input_digest=draft.digest,
                token_ids=new.token_ids,
                logprobs=new.logprobs,
                version_spans=new.version_spans,
                finish_reason=finished.finish_reason if finished else None,
            )
            part = Part(
                group_id=self.claimed.group_id,
                claim_token=self.claimed.claim_token,
                first_token=draft.stored,
                answer=answer,
            )
            news.append((part, draft, finished is not None))
        return news


def _generation(token_ids: list[int], logprobs: list[float], version_spans: list[tuple[int, int]]) -> Generation:
    """Return the tokens of an unfinished answer, with the spans that begin within them."""
    return Generation(token_ids, logprobs, "", "abort", [span for span in version_spans if span[0] < len(token_ids)])


def _continued(kept: Generation, sampled: Generation) -> Generation:
    """Return the kept tokens and those sampled after them as one generation."""
    spans = list(kept.version_spans)
    for start, version in sampled.version_spans:
        if not spans or spans[-1][1] != version:
            spans.append((len(kept.token_ids) + start, version))
    return Generation(
        [*kept.token_ids, *sampled.token_ids], [*kept.logprobs, *sampled.logprobs], "", sampled.finish_reason, spans
    )
