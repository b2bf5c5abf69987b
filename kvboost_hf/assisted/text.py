"""`DraftedText`: the text of one row of a `generate()` call that drafts, and what ends it."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from kvboost_hf.assisted.rounds import Taken, follow
from kvboost_hf.assisted.tree import Tree


class DraftedText:
    """The text of a row, and what ends it.

    Args:
        ids: The prompt, [tokens], padding included.
        pads: How many of them are padding.
        criteria: The stopping criteria of the call.
        processors: Logits processors of the row.
        config: The configuration of the call.
        seed: Seeds the random numbers that sample the row's tokens; None for those of PyTorch.
        streamer: Gets the tokens.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        pads: int,
        criteria: StoppingCriteriaList,
        processors: Any,
        config: Any,
        *,
        seed: int | None = None,
        streamer: Any = None,
    ) -> None:
        self._like, self._processors, self._streamer = ids[:0], processors, streamer
        self._text = ids.long().cpu().numpy()  # in a buffer of its own as soon as it grows
        self._prompt, self._stop, self.pads = len(ids), len(ids), pads
        self._most = min(
            [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)], default=sys.maxsize
        )
        found: Any = [each for each in criteria if isinstance(each, EosTokenCriteria)]
        self.ends = frozenset(int(token) for each in found for token in each.eos_token_id.tolist())
        self._criteria: list[Any] = [
            each for each in criteria if not isinstance(each, EosTokenCriteria | MaxLengthCriteria)
        ]
        self._samples: bool = config.do_sample
        # Of its own among several rows: how many tokens others accept must not change what this one says.
        self._draws = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
        wants = [name for name in ("scores", "logits") if getattr(config, f"output_{name}")]
        # [1, vocab_size] of each token.
        self.returned: dict[str, list[torch.Tensor]] = {name: [] for name in wants if config.return_dict_in_generate}
        self.is_plain = not (self._samples or self.returned or len(processors))  # the likeliest tokens are the answer
        self.done = False

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return self._stop - self._prompt

    @property
    def room(self) -> int:
        """Tokens that the answer may still grow by."""
        return self._most - self._stop

    @property
    def last(self) -> int:
        """The last token, whose K/V is not computed yet."""
        return int(self._text[self._stop - 1])

    @property
    def ids(self) -> torch.Tensor:
        """The text without padding, [1, tokens], on the host."""
        return torch.from_numpy(self._text[self.pads : self._stop])[None]

    @property
    def whole(self) -> torch.Tensor:
        """The text as generate() has it, [1, tokens], padding included."""
        return torch.from_numpy(self._text[: self._stop]).to(self._like, copy=True)[None]

    def answer(self, start: int, stop: int, pad: int) -> list[int]:
        """Tokens [start, stop) of the answer, with padding behind its end."""
        said: list[int] = self._text[self._prompt + start : min(self._prompt + stop, self._stop)].tolist()
        return said + [pad] * (stop - start - len(said))

    def take(self, tree: Tree, logits: torch.Tensor, greedy: Sequence[int] | None = None) -> Taken:
        """Accept tokens of a tree.

        Args:
            tree: The drafts.
            logits: [1 + tokens of the tree, vocab_size], behind the text and each token.
            greedy: The likeliest token of each, if that is known already and the text `is_plain`.
        """
        before = self._stop
        if greedy is None and self.is_plain:
            greedy = logits.argmax(-1).tolist()  # the device is waited for once

        def choose(at: int) -> tuple[int, bool]:
            token = greedy[at + 1] if greedy is not None else self._chosen(logits[at + 1])
            self._append(token)
            self.done = token in self.ends or self.room <= 0 or any(map(self._is_met, self._criteria))
            return token, self.done

        taken = follow(tree, choose)
        if self._streamer is not None:
            self._streamer.put(torch.from_numpy(self._text[before : self._stop].copy())[None])
            if self.done:
                self._streamer.end()
        return taken

    def _append(self, token: int) -> None:
        if self._stop >= len(self._text):
            longer = np.empty(max(min(2 * self._stop + 64, self._most), self._stop + 1), dtype=np.int64)
            longer[: self._stop] = self._text[: self._stop]
            self._text = longer
        self._text[self._stop] = token
        self._stop += 1

    def _chosen(self, logits: torch.Tensor) -> int:
        row = logits[None].to(copy=True, dtype=torch.float32, device=self._like.device)
        scores = self._processors(self.whole, row)
        for name, found in self.returned.items():
            found.append(scores if name == "scores" else row)
        if not self._samples:
            return int(scores.argmax(-1))
        return int(scores.softmax(-1).multinomial(1, generator=self._draws))

    def _is_met(self, criterion: Any) -> bool:
        scores = self.returned.get("scores")
        return bool(criterion(self.whole, None if scores is None else tuple(scores)).all())
