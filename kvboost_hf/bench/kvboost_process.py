"""kvboost 0.9.0 in an interpreter of its own, for `kvboost-hf bench --peer-python`.

    PYTHON -I kvboost_process.py MODEL DEVICE DTYPE THREADS

The interpreter needs kvboost, torch and transformers, and not this package; `benchmarks/kvboost_peer.py` tells how to
install them. Each line of standard input is a JSON object, and each gets one in answer:

    {"open": "selective"}                                             a new engine, with this recompute_strategy
    {"engine": "selective", "text": TEXT, "max_new_tokens": 16}       what it answers, and what that took

Engines are built as `benchmarks/kvboost_peer.py` does. They stop at the tokenizer's end token alone, and tokenize
within the clock.
"""

import contextlib
import json
import sys
import time
from typing import Any

_ENGINE = {"chunk_size": 128, "max_cache_bytes": 2_000_000_000}


def serve(name: str, device: str, dtype: str, threads: int) -> None:
    """Answer lines until there are no more.

    Args:
        name: A hub name or a folder.
        device: Where the model runs.
        dtype: As `from_pretrained()` takes it.
        threads: Of torch.
    """
    import torch
    from kvboost import GenerationMode, KVBoost
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    model.to(device).eval()
    engines: dict[str, Any] = {}
    forwarded = 0

    def count(_module: Any, _args: Any, embedded_BTH: torch.Tensor) -> None:
        nonlocal forwarded
        forwarded += embedded_BTH.shape[:-1].numel()

    def answer(engine: str, text: str, max_new_tokens: int) -> dict[str, Any]:
        ids: list[int] = []
        first_ms, first, start, begin = 0.0, 0, forwarded, time.perf_counter()

        def on_token(token: int) -> None:
            nonlocal first_ms, first
            if not ids:
                first_ms, first = 1000 * (time.perf_counter() - begin), forwarded
            ids.append(token)

        mode = GenerationMode.CHUNK_KV_REUSE
        found = engines[engine].generate(text, max_new_tokens=max_new_tokens, mode=mode, on_token=on_token)
        return {
            "prompt_tokens": found.prompt_tokens,
            "ids": ids,
            "ttft_ms": first_ms,
            "total_ms": 1000 * (time.perf_counter() - begin),
            "prefilled": first - start,
            "forwarded": forwarded - start,
            "reused": found.cached_tokens,
        }

    model.get_input_embeddings().register_forward_hook(count)
    for line in sys.stdin:
        asked = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            if strategy := asked.get("open"):
                options = {"device": device, "recompute_strategy": strategy, **_ENGINE}
                engines[strategy] = KVBoost(model=model, tokenizer=tokenizer, **options)
                told: dict[str, Any] = {}
            else:
                told = answer(**asked)
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
