"""The run's policy as a model for stages, for example as a judge or to rephrase tasks.

The engine is started at the first question, in the pipeline worker's process, and loads the newest published weights before every
batch of questions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from operators.base import Messages
from rftcore.engines.base import Decoding, Engine, EngineConfig
from rftcore.resolved import ResolvedRun
from rftcore.workflows.chat_encoding import chat_encoder
from rftdata.attempts.policies import PolicyVersion, newest_policy
from rftdata.errors import EngineStoppedError, ModelError
from rftdata.run import Run


class Policy:
    """Answers chats with the run's model.

    Args:
        resolved: of the run.
        run: the run that publishes its weights; None to answer with the initial model.
    """

    def __init__(self, resolved: ResolvedRun, run: Run | None = None) -> None:
        self._resolved, self._seed = resolved, resolved.config.run.seed
        self._run = run
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    def __call__(self, chats: Sequence[Messages], max_tokens: int, temperature: float) -> list[str | Exception]:
        """Return one answer per chat, as text; an error for a chat that the chat template or the engine rejects.

        Raises:
            ModelError: the model cannot be loaded.
        """
        with self._lock:  # parts of a batch may ask concurrently
            engine = self._engine or self._start()
            self._take_newest(engine)
        decoding = Decoding(temperature=temperature, max_tokens=max_tokens, seed=self._seed if temperature else None)
        answers = asyncio.run(_answers(engine, chats, decoding))
        if any(isinstance(answer, EngineStoppedError) for answer in answers):
            self._leave(engine)
        return answers

    def version(self) -> str:
        """Return the version of the weights for the next question, provided that they can be loaded."""
        newest = self._newest()
        return str(newest.policy_version_id) if newest is not None else "first"

    def close(self) -> None:
        """Stop the engine if it was started."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _start(self) -> Engine:
        from rftcore.engines.transformers_engine import TransformersEngine

        self._engine = TransformersEngine(self._resolved.model_folder, EngineConfig(seed=self._seed), 0)
        return self._engine

    def _leave(self, engine: Engine) -> None:
        """Close a stopped engine, which answers no more questions; the next question starts another."""
        with self._lock:
            if self._engine is engine:
                self.close()

    def _take_newest(self, engine: Engine) -> None:
        newest = self._newest()
        if newest is None or newest.policy_version_id == engine.policy_version_id:
            return
        try:
            engine.load_weights(newest.uri, newest.policy_version_id, newest.checksum)
        except ModelError:
            return  # replaced or removed meanwhile: the engine keeps its weights, and the next batch tries again

    def _newest(self) -> PolicyVersion | None:
        return newest_policy(self._run) if self._run is not None else None


async def _answers(engine: Engine, chats: Sequence[Messages], decoding: Decoding) -> list[str | Exception]:
    return await asyncio.gather(*(_answer(engine, chat, decoding) for chat in chats))


async def _answer(engine: Engine, chat: Messages, decoding: Decoding) -> str | Exception:
    try:
        prompt = chat_encoder(engine.tokenizer).prompt([dict(message) for message in chat]).token_ids
        return (await engine.generate(prompt, decoding)).text
    except Exception as error:  # noqa: BLE001 - an error of one chat must not affect the others
        return error
