"""`Watch`: follows a generate() call while it runs, and can end it."""

import time
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Watch(StoppingCriteria):
    """Notes when the first token is on the host, passes tokens on, and ends the call when it is told to.

    Unlike a streamer it may be used with several rows, assistants and trees of drafts.

    Attributes:
        once_a_round: Drafts may go on: no token decides when it ends a text, so that it need not be asked at each.

    Args:
        prompt_tokens: Columns of the prompt.
        streamer: Gets the tokens of the only row; None for nobody.
    """

    once_a_round = True

    def __init__(self, prompt_tokens: int, streamer: BaseStreamer | None = None) -> None:
        self.first_at: float | None = None  # by time.perf_counter()
        self._seen = prompt_tokens
        self._streamer = streamer
        self._cancelled = False

    def cancel(self) -> None:
        """End the call with the token that is being computed. Any thread may call it."""
        self._cancelled = True

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """See `StoppingCriteria`."""
        if self._streamer is not None and input_ids.shape[1] > self._seen:
            self._streamer.put(input_ids[0, self._seen :].cpu())  # type: ignore[no-untyped-call]
            self._seen = input_ids.shape[1]
        if self.first_at is None:
            input_ids[0, -1].item()  # waits for the device
            self.first_at = time.perf_counter()
        done: Any = torch.full((len(input_ids),), self._cancelled, device=input_ids.device)
        return done  # type: ignore[no-any-return]
