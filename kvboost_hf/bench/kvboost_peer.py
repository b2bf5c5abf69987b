"""Serves prompts with kvboost 0.9.0, which runs in an environment of its own (see `environments.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from kvboost_hf.bench.models import Counted, Models
from kvboost_hf.bench.served import Served, Server, reason

# The chunks that its documentation shows, and the budget of its server; all else is left to it.
_ENGINE = {"chunk_size": 128, "max_cache_bytes": 2_000_000_000}


@dataclass(frozen=True, slots=True)
class KVBoostPeer:
    """kvboost with one of its repair strategies."""

    name: str
    strategy: str
    needs: str | None = "kvboost==0.9.0"

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model here, or None."""
        try:
            self.open(models, tokenizer, None).close()
        except Exception as error:  # of whatever kind: the others run all the same
            return reason(error)
        return None

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        """A new engine; it keeps nothing in folders."""
        return _Engine(models.get(), tokenizer, self.strategy)


class _Engine:
    def __init__(self, counted: Counted, tokenizer: Any, strategy: str) -> None:
        import kvboost

        self._count, self._tokenizer = counted.forwards, tokenizer
        self._mode = kvboost.GenerationMode.CHUNK_KV_REUSE
        options: dict[str, Any] = {"device": str(counted.model.device), "recompute_strategy": strategy, **_ENGINE}
        self._engine = kvboost.KVBoost(model=counted.model, tokenizer=tokenizer, **options)

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        """See `Server.answer`; it tokenizes within the clock, and what it says to have reused is what it says."""
        text, said = self._tokenizer.decode(ids), list[int]()
        start, begin, first_ms, first = self._count.tokens, perf_counter(), 0.0, 0

        def on_token(token: int) -> None:
            nonlocal first_ms, first
            if not said:
                first_ms, first = 1000 * (perf_counter() - begin), self._count.tokens
            said.append(token)

        found = self._engine.generate(text, max_new_tokens=max_new_tokens, mode=self._mode, on_token=on_token)
        total_ms = 1000 * (perf_counter() - begin)
        assert found.prompt_tokens == len(ids), f"kvboost saw {found.prompt_tokens} tokens of {len(ids)}"
        return Served(
            ids=said,
            ttft_ms=first_ms,
            total_ms=total_ms,
            prefilled=first - start,
            forwarded=self._count.tokens - start,
            reused=found.cached_tokens,
        )

    def close(self) -> None:
        """See `Server.close`."""


KVBOOST_PEERS = [KVBoostPeer(f"kvboost-{way}", way) for way in ("none", "selective", "cacheblend")]
