"""`ScriptedEngine`: a real engine whose model says what a script wants, and counts what could have been reused."""

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.internals.server import Finished, Job, JobEvent, Listener, ModelCard, ModelEngine, Session, SessionChange
from tests.internals.top import common_prefix

_MARK = re.compile(r"errand-(\w+)")


@dataclass(frozen=True)
class Step:
    """One answer of a script.

    Args:
        mark: A text that the answer contains, and no other step of any script.
        text: The answer as the model writes it, its calls of tools included.
    """

    mark: str
    text: str


@dataclass
class Turn:
    """One request that the engine has answered.

    Attributes:
        errand: The script that it belongs to; None for a request beside it, such as one for a title.
        tokens: The number of tokens of the prompt.
        ideal: The number of first tokens that the prompt shares with a prompt and answer before it, at most.
        cached: The number of tokens that the engine has reused.
    """

    errand: str | None
    tokens: int
    ideal: int
    cached: int = 0


class Spoken:
    """A `Constraint` that allows the tokens of one text, in their order.

    Args:
        ids: The tokens, with the one that ends the answer.
        vocab_size: The number of the model's logits.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self._ids, self._vocab_size, self._said = ids, vocab_size, 0

    def allowed(self) -> Tensor:
        """[vocab_size], bool."""
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[self._ids[min(self._said, len(self._ids) - 1)]] = True
        return allowed

    def advance(self, token: int) -> None:
        """Go on to the next token."""
        self._said += 1

    @property
    def finished(self) -> bool:
        """Whether all was said."""
        return self._said >= len(self._ids)


@dataclass
class ScriptedEngine:
    """Runs jobs on an engine; the answer to a prompt is the first step of its script that the prompt does not contain.

    The script is the one whose name, `errand-NAME`, stands last in the prompt. Prompts without tools get a title.

    Attributes:
        engine: What computes K/V, reuses it, and counts.
        tokenizer: The tokenizer of its model.
        scripts: By name, the steps.
        turns: All that was answered.
        aside: The answer to requests beside the scripts.
    """

    engine: ModelEngine
    tokenizer: Any
    scripts: dict[str, list[Step]]
    turns: list[Turn] = field(default_factory=list)
    aside: str = "A title"
    _seen: list[list[int]] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def model_card(self) -> ModelCard:
        return self.engine.model_card

    def submit(self, job: Job, listener: Listener) -> Any:
        """Queue a job whose answer is the script's."""
        ids = list(job.ids)
        errand, text = self._answer(self.tokenizer.decode(ids))
        ideal = max((common_prefix(ids, seen) for seen in self._seen), default=0)
        turn = Turn(errand, len(ids), min(ideal, len(ids) - 1))
        self.turns.append(turn)
        said = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

        def listen(event: JobEvent) -> None:
            if isinstance(event, Finished):
                turn.cached = event.cached_tokens
                self._seen.append([*ids, *event.ids])
            listener(event)

        constraint = Spoken(said[: job.options.max_tokens], self.vocab_size)
        options = replace(job.options, temperature=0.0, constraint=constraint)
        return self.engine.submit(replace(job, options=options), listen)

    def _answer(self, prompt: str) -> tuple[str | None, str]:
        names = [name for name in _MARK.findall(prompt) if name in self.scripts]
        if not names or "<tools>" not in prompt:
            return None, self.aside
        steps = self.scripts[names[-1]]
        left = [step for step in steps if step.mark not in prompt]
        return names[-1], (left[0] if left else steps[-1]).text

    def embed(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> Future[list[list[float]]]:
        return self.engine.embed(texts, client)

    def known_tokens(self, prompts: Sequence[Sequence[int]], salt: bytes) -> list[int]:
        return self.engine.known_tokens(prompts, salt)

    def sessions(self, client: bytes | None, id: str | None = None) -> list[Session]:
        return self.engine.sessions(client, id)

    def change_session(self, client: bytes, id: str, change: SessionChange) -> Session | None:
        return self.engine.change_session(client, id, change)

    def drop_session(self, client: bytes, id: str, salt: bytes) -> dict[str, int] | None:
        return self.engine.drop_session(client, id, salt)

    def load(self) -> dict[str, int]:
        return self.engine.load()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def drain(self, timeout_s: float) -> bool:
        return self.engine.drain(timeout_s)
