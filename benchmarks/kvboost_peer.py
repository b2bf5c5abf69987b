"""Run the peer library kvboost 0.9.0 on a workload and print what it did, as JSON.

The file is run by the interpreter of the peer's own virtual environment, as a subprocess of a benchmark that
measures kvboost_hf on the same machine, model and texts. It imports torch, transformers and kvboost, never kvboost_hf,
and kvboost_hf never imports it:

    PEER_PYTHON benchmarks/kvboost_peer.py --workload workload.json --model DIR [--threads N] [--device cpu]

**The environment.** Python 3.11 or newer with the benchmark's own versions of torch and transformers (and what these
need: accelerate, numpy, tokenizers), then `pip install --no-deps kvboost==0.9.0 sentencepiece`. The release runs
unchanged on transformers 5.23; no older transformers and no patch are used.

**The engine.** `KVBoost(model=..., tokenizer=..., chunk_size=128, max_cache_bytes=2e9, recompute_strategy=...)`, all
else at the release's defaults; 2e9 bytes is its server's default budget (the constructor has none), 128 its default
chunk. `KVBoost.from_pretrained` is not used, because it casts the model to float16; the model is loaded in float32 and
given to the public constructor. All calls are greedy `engine.generate()` in mode `chunk_kv_reuse`, or `baseline`.
Where a chunk matches by its content but not by its prefix (a moved document), the engine repairs with CacheBlend,
whatever `recompute_strategy` says.

**What is timed.** One public `generate()` call with `max_new_tokens=1`, tokenization included, by the host's clock.
`first_token_ms` ends when the engine hands the token, a host integer, to its `on_token` callback: this is what a
streaming caller waits for. `generate_ms` ends when the call returns: it adds the second pass over new chunks that the
engine makes to store them. `claimed_ttft_ms` is the `ttft_ms` in the engine's own result: its clock starts after
tokenization, look-up, assembly and repair. Every call is made on a fresh engine (an empty cache over the same model
object) that has generated on the case's `prime` texts, untimed. The methods take turns, and the first round over them
is an untimed warm-up of the process.

Workload:

    {"max_new_tokens": 1,        # for the prime texts; the timed call always makes one token
     "cases": [{"name": "warm", "prime": [TEXT, ...], "prompt": TEXT, "repeats": 5}, ...],
     "answers": {"max_new_tokens": 16, "prompts": [TEXT, ...]}}

Output, one object on stdout (what the peer and its dependencies print goes to stderr):

    {"peer": "kvboost", "version": "0.9.0", "torch": ..., "transformers": ...,
     "device": "cpu", "threads": 1, "chunk_size": 128, "max_cache_bytes": 2000000000,
     "cases": [                             # one entry for each case and method
        {"case": "warm",
         "method": "none",                  # "plain": transformers' model.generate(), for ratios within this process
                                            # "baseline": the peer's generate() that reuses nothing
                                            # "none", "selective" (its default), "cacheblend": its recompute_strategy
         "prompt_tokens": 600,
         "claimed_cached_tokens": 512,      # by the engine's result; 0 for plain
         "first_token_ms": [...],           # call to first token, one number for each repeat, in order
         "generate_ms": [...],              # call to return; equals first_token_ms for plain
         "claimed_ttft_ms": [...],          # the engine's own ttft_ms; [] for plain
         "forwarded_tokens": 176,           # tokens through the model, call to return (the same in every repeat)
         "forwarded_to_first_token": 88,    # of these, before the first token
         "forward_calls": 2,                # calls of the model, call to return
         "same_token": true},               # in every repeat the token is the one of plain
        ...],
     "answers": [                           # plain, then one entry for each method, one engine over all prompts
        {"method": "none",
         "prompts": 8,
         "equal": 6,                        # prompts whose token ids are all those of plain
         "different": [2, 5],               # the indices of the others
         "said": [TEXT, ...],               # the answers, without special tokens
         "forwarded_tokens": 4242,          # over all prompts, storing included
         "evictions": 0},                   # chunks that the engine dropped or refused for want of room
        ...]}

The peer stops at `tokenizer.eos_token_id`; plain is told to stop at the same token. In `answers`, baseline is the
control: it computes what plain computes, so all of its answers must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from kvboost import GenerationMode, KVBoost

ENGINE = {"chunk_size": 128, "max_cache_bytes": 2_000_000_000}
STRATEGIES = ("none", "selective", "cacheblend")
METHODS = ("plain", "baseline", *STRATEGIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    prime: list[str]  # texts the engine generates on, untimed, before the timed call
    prompt: str
    repeats: int

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"`repeats` of case {self.name!r} must be at least 1, got {self.repeats}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    token_ids: list[int]  # the new tokens
    prompt_tokens: int
    claimed_cached_tokens: int
    claimed_ttft_ms: float | None  # None for plain, which claims nothing
    first_token_ms: float
    generate_ms: float
    forwarded_tokens: int
    forwarded_to_first_token: int
    forward_calls: int


class ForwardCount:
    """Counts what passes the model's input embedding; a forward hook."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.tokens = 0
        self.calls = 0
        model.get_input_embeddings().register_forward_hook(self)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], embedded_BTH: torch.Tensor) -> None:
        self.tokens += embedded_BTH.shape[:-1].numel()
        self.calls += 1


class Plain:
    """transformers' own greedy generate()."""

    evictions = 0

    def __init__(self, model: transformers.PreTrainedModel, tokenizer: Any, count: ForwardCount) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.count = count

    def prime(self, texts: list[str], max_new_tokens: int) -> None:
        """Nothing to do: plain keeps nothing between calls."""

    def call(self, prompt: str, max_new_tokens: int) -> Call:
        tokens, calls = self.count.tokens, self.count.calls
        start = time.perf_counter()
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        output_1T = self.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        output_ids = output_1T[0].tolist()  # waits for the device
        generate_ms = 1e3 * (time.perf_counter() - start)
        prompt_tokens = inputs["input_ids"].shape[1]
        return Call(
            token_ids=output_ids[prompt_tokens:],
            prompt_tokens=prompt_tokens,
            claimed_cached_tokens=0,
            claimed_ttft_ms=None,
            first_token_ms=generate_ms,
            generate_ms=generate_ms,
            forwarded_tokens=self.count.tokens - tokens,
            forwarded_to_first_token=self.count.tokens - tokens,
            forward_calls=self.count.calls - calls,
        )


class Peer:
    """A fresh engine of the peer, in one of its recompute strategies or in its baseline mode."""

    def __init__(self, model: transformers.PreTrainedModel, tokenizer: Any, count: ForwardCount, method: str) -> None:
        device = str(model.device)
        self.count = count
        self.mode = GenerationMode.BASELINE if method == "baseline" else GenerationMode.CHUNK_KV_REUSE
        strategy = {"recompute_strategy": method} if method in STRATEGIES else {}
        self.engine = KVBoost(model=model, tokenizer=tokenizer, device=device, **ENGINE, **strategy)

    @property
    def evictions(self) -> int:
        stats = self.engine.cache_stats()
        return stats["evictions"] + stats["budget_rejections"]

    def prime(self, texts: list[str], max_new_tokens: int) -> None:
        for text in texts:
            self.engine.generate(text, max_new_tokens=max_new_tokens, mode=self.mode)

    def call(self, prompt: str, max_new_tokens: int) -> Call:
        token_ids: list[int] = []
        first_token_s = 0.0
        tokens_at_first = 0

        def on_token(token_id: int) -> None:
            nonlocal first_token_s, tokens_at_first
            if not token_ids:
                first_token_s = time.perf_counter()
                tokens_at_first = self.count.tokens
            token_ids.append(token_id)

        tokens, calls = self.count.tokens, self.count.calls
        start = time.perf_counter()
        result = self.engine.generate(prompt, max_new_tokens=max_new_tokens, mode=self.mode, on_token=on_token)
        end = time.perf_counter()
        return Call(
            token_ids=token_ids,
            prompt_tokens=result.prompt_tokens,
            claimed_cached_tokens=result.cached_tokens,
            claimed_ttft_ms=result.ttft_ms,
            first_token_ms=1e3 * (first_token_s - start),
            generate_ms=1e3 * (end - start),
            forwarded_tokens=self.count.tokens - tokens,
            forwarded_to_first_token=tokens_at_first - tokens,
            forward_calls=self.count.calls - calls,
        )


class Bench:
    """The model, its tokenizer and the count of its forwards, shared by all engines."""

    def __init__(self, model_dir: Path, device: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.model.to(device).eval()  # type: ignore[arg-type]
        # The peer reads no generation config and stops at the tokenizer's eos alone; so does plain.
        eos = self.tokenizer.eos_token_id
        self.model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=eos)
        self.count = ForwardCount(self.model)

    def fresh(self, method: str) -> Plain | Peer:
        """An engine for `method` with nothing in its cache."""
        if method == "plain":
            return Plain(self.model, self.tokenizer, self.count)
        return Peer(self.model, self.tokenizer, self.count, method)

    def run_case(self, case: Case, max_new_tokens: int) -> list[dict[str, Any]]:
        """Times the case's prompt with every method; one output entry for each."""
        calls: dict[str, list[Call]] = defaultdict(list)
        for round_index in range(1 + case.repeats):
            for method in METHODS:
                engine = self.fresh(method)
                engine.prime(case.prime, max_new_tokens)
                gc.collect()
                call = engine.call(case.prompt, max_new_tokens=1)
                if round_index > 0:  # round 0 warms the process up
                    calls[method].append(call)
        plain_ids = calls["plain"][0].token_ids
        return [case_entry(case.name, method, calls[method], plain_ids) for method in METHODS]

    def run_answers(self, prompts: list[str], max_new_tokens: int) -> list[dict[str, Any]]:
        """Answers all prompts in order with one engine for each method, and compares the ids with plain's."""
        entries = []
        plain_ids: list[list[int]] = []
        for method in METHODS:
            engine = self.fresh(method)
            calls = [engine.call(prompt, max_new_tokens) for prompt in prompts]
            token_ids = [call.token_ids for call in calls]
            if method == "plain":
                plain_ids = token_ids
            different = [i for i, ids in enumerate(token_ids) if ids != plain_ids[i]]
            entries.append(
                {
                    "method": method,
                    "prompts": len(prompts),
                    "equal": len(prompts) - len(different),
                    "different": different,
                    "said": [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids],
                    "forwarded_tokens": sum(call.forwarded_tokens for call in calls),
                    "evictions": engine.evictions,
                }
            )
        return entries


def case_entry(name: str, method: str, calls: list[Call], plain_ids: list[int]) -> dict[str, Any]:
    """One case and method in the output's form; the counts must be the same in every repeat."""
    first = calls[0]
    counts = {(c.forwarded_tokens, c.forwarded_to_first_token, c.forward_calls) for c in calls}
    assert len(counts) == 1, f"repeats of case {name!r} with {method!r} forward different tokens: {counts}"
    return {
        "case": name,
        "method": method,
        "prompt_tokens": first.prompt_tokens,
        "claimed_cached_tokens": first.claimed_cached_tokens,
        "first_token_ms": [round(c.first_token_ms, 3) for c in calls],
        "generate_ms": [round(c.generate_ms, 3) for c in calls],
        "claimed_ttft_ms": [round(c.claimed_ttft_ms, 3) for c in calls if c.claimed_ttft_ms is not None],
        "forwarded_tokens": first.forwarded_tokens,
        "forwarded_to_first_token": first.forwarded_to_first_token,
        "forward_calls": first.forward_calls,
        "same_token": all(c.token_ids == plain_ids for c in calls),
    }


def run(workload: dict[str, Any], model_dir: Path, device: str) -> dict[str, Any]:
    """Runs the whole workload and returns the output object."""
    bench = Bench(model_dir, device)
    cases = [Case(**case) for case in workload["cases"]]
    return {
        "peer": "kvboost",
        "version": importlib.metadata.version("kvboost"),  # its __version__ lags behind
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        **ENGINE,
        "cases": [entry for case in cases for entry in bench.run_case(case, workload["max_new_tokens"])],
        "answers": bench.run_answers(**workload["answers"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Run kvboost 0.9.0 on a workload and print what it did, as JSON.")
    parser.add_argument("--workload", type=Path, required=True, help="JSON file; its form is in this file's docstring")
    parser.add_argument("--model", type=Path, required=True, help="folder with a model and its tokenizer")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--device", default="cpu", help="torch device of the model (default: cpu)")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with contextlib.redirect_stdout(sys.stderr):
        output = run(json.loads(args.workload.read_text()), args.model, args.device)
    print(json.dumps(output))


if __name__ == "__main__":
    main()
