"""Prompts of models with states: first tokens after edits and over turns, rules for keeping states, bytes of a state.

    PYTHONPATH=. python benchmarks/hybrids.py --out benchmarks/results [--figure docs/images/hybrids.png]

The model is a random Qwen3-Next (three layers of linear attention to one of full attention) in float32. On a CPU
linear attention runs in transformers' reference code.

`edits`: a cache has seen a prompt; the clock runs from a call with one token of it changed to the first new token.
`turns`: a chat over one store with a new cache each turn, as after a restart, or where answers come back as other
tokens than were generated. `cold`: prompts that nobody has seen, which leave states every 64 tokens, by the size of
the model; plain calls take turns with them. `rules`: tokens forwarded by agents' sessions over one store, by its size
and by where states are saved: this library's rule; the last border of each prompt, alone or with the columns where
prompts part; borders of messages, and where prompts part; each border of a chunk; every 2,048 tokens. They are counted
on a small model whose states are as large as the K/V of 228 tokens. `bytes`: the states of default configurations of
transformers, from models without weights.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from record import Record, add_options
from reuse import Ids, measured_on, provenance, ttft
from shapes import drawn
from targets import Result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from kvboost_hf.cache.forward import prompt_plan
from kvboost_hf.cache.layers.stateful import states_of
from kvboost_hf.compat import PrivateCache, cache_layers, run_model

TOKENS = 3000
COLD_TOKENS = 2048
SHAPES = ((8, 256), (24, 512), (12, 1024))  # layers, width
PLACES = (0.05, 0.25, 0.5, 0.75, 0.95)
TURNS = 6
CHUNK = 128
FAMILIES = {  # model types of transformers, and the model that the default configuration is like, as its page says
    "qwen3_next": "Qwen3-Next-80B-A3B",
    "qwen3_5_text": "Qwen3.5",
    "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H",
    "granitemoehybrid": "Granite 4",
    "lfm2": "LFM2",
    "olmo_hybrid": "OLMo Hybrid",
    "kimi_linear": "Kimi Linear",
    "zamba2": "Zamba2",
}


def make(layers: int, width: int, *, kv_heads: int | None = None, head_dim: int = 64) -> PreTrainedModel:
    heads = width // 64
    with drawn("cpu", torch.float32):
        config = AutoConfig.for_model(
            "qwen3_next",
            vocab_size=1024,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1) if kv_heads is None else kv_heads,
            head_dim=head_dim,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            mlp_only_layers=list(range(layers)),
            max_position_embeddings=65_536,
            eos_token_id=None,
            bos_token_id=0,
            pad_token_id=0,
        )
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    check_model_compatibility(model)
    return model


def edits(model: PreTrainedModel, rounds: int) -> list[Result]:
    """First token after one token was changed, by its place."""
    fresh, found = Ids(1), []
    ids = fresh(TOKENS)
    ttft(model, ids)
    for place in PLACES:
        at = int(place * TOKENS)
        times: dict[str, list[float]] = {"plain": [], "reused": []}
        forwarded = []
        for number in range(rounds):
            cache = ChunkReuseCache(model, ChunkStore(model))
            ttft(model, ids, cache=cache)
            edited = [*ids[:at], (ids[at] + 1 + number) % 1000 + 10, *ids[at + 1 :]]
            times["plain"].append(ttft(model, edited))
            times["reused"].append(ttft(model, edited, cache=cache))
            forwarded.append(cache.report.forwarded_tokens)
        middle = {name: statistics.median(values) for name, values in times.items()}
        found.append({"at": at, **middle, "forwarded": max(forwarded), "least": TOKENS - at})
        print(found[-1], flush=True)
    return found


def turns(model: PreTrainedModel) -> list[Result]:
    """First token by turn of a chat: 800 tokens, and then 200 new ones each time."""
    fresh, found = Ids(2), []
    ids, store = fresh(800), ChunkStore(model)
    for turn in range(1, TURNS + 1):
        plain, cache = ttft(model, ids), ChunkReuseCache(model, store)
        reused = ttft(model, ids, cache=cache)
        found.append({"turn": turn, "tokens": len(ids), "plain": plain, "reused": reused})
        found[-1]["forwarded"] = cache.report.forwarded_tokens
        print(found[-1], flush=True)
        ids = ids + fresh(200)
    return found


def cold(rounds: int) -> list[Result]:
    """First token of a prompt whose tokens are all new."""
    found: list[Result] = []
    for layers, width in SHAPES:
        model, fresh = make(layers, width), Ids(3)
        times: dict[str, list[float]] = {"plain": [], "reused": []}
        for number in range(rounds + 1):
            store = ChunkStore(model)
            plain = ttft(model, fresh(COLD_TOKENS))
            reused = ttft(model, fresh(COLD_TOKENS), cache=ChunkReuseCache(model, store))
            if number:  # the first of each is for caches of the allocator
                times["plain"].append(plain)
                times["reused"].append(reused)
        middle = {name: statistics.median(values) for name, values in times.items()}
        found.append({"layers": layers, "width": width, **middle, "states": store.stats()["states"]})
        print(found[-1], flush=True)
    return found


class Prompt(NamedTuple):
    """A prompt of an agent."""

    ids: list[int]
    borders: tuple[int, ...]  # where its messages end


def _sessions(rng: random.Random, agents: int, steps: int) -> list[Prompt]:
    """Prompts of agents that share a head of rules, take turns, and change one of their last messages now and then."""

    def drawn_ids(count: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(count)]

    head = drawn_ids(700)
    texts = [[*head, *drawn_ids(300)] for _ in range(agents)]
    borders = [[700, 1000] for _ in range(agents)]
    prompts = []
    for _ in range(agents * steps):
        agent = rng.randrange(agents)
        text = texts[agent]
        if rng.random() < 0.3:
            text[rng.randrange(len(text) * 2 // 3, len(text))] = rng.randrange(10, 1000)
        text += drawn_ids(rng.randrange(50, 400))
        borders[agent].append(len(text))
        prompts.append(Prompt(list(text), tuple(borders[agent])))
    return prompts


def _wanted(rule: str, prompts: dict[int, Prompt]) -> Callable[..., tuple[list[int], list[int], list[int]]]:
    """A rule in place of `prompt_plan._state_cuts`, by the prompts of their lengths."""
    own = prompt_plan._state_cuts

    def cuts(parts, model, plan, ledger, prompt):
        before, stops, _ = own(parts, model, plan, ledger, prompt)
        border = ledger.last_border(prompt.limit, parts.binding.store, prompt.ids)
        if rule == "last border":
            return before, [stop for stop in stops if stop == border], []
        if rule == "last border and partings":
            return before, stops, []
        step = CHUNK if rule == "each border" else 2048
        every = {at for at in range(step, prompt.limit + 1, step)}
        if rule == "messages and partings":
            every = {*stops, *prompts[prompt.columns].borders} if prompt.columns in prompts else {*stops}
        return before, sorted(at for at in every if plan.filled < at <= prompt.limit and at != prompt.columns), []

    return own if rule == "this library" else cuts


RULES = (
    "last border",
    "last border and partings",
    "messages and partings",
    "every 2,048",
    "each border",
    "this library",
)
SIZES = (1, 2, 4, 8, 16)  # MB


def rules() -> list[Result]:
    """Tokens that sessions forward, by the size of a store and by rule."""
    model = make(4, 64, kv_heads=1, head_dim=32)
    prompts = _sessions(random.Random(5), agents=4, steps=6)
    asked = sum(len(prompt.ids) for prompt in prompts)
    by_length = {len(prompt.ids): prompt for prompt in prompts}
    found = []
    for megabytes, rule in product(SIZES, RULES):
        store = ChunkStore(model, max_bytes=megabytes * 2**20, chunk_size=CHUNK)
        forwarded = 0
        with mock.patch.object(prompt_plan, "_state_cuts", _wanted(rule, by_length)):
            for prompt in prompts:
                cache = ChunkReuseCache(model, store)
                ttft(model, prompt.ids, cache=cache)
                forwarded += cache.report.forwarded_tokens
        states = store.stats()["states"]
        found.append({"rule": rule, "mb": megabytes, "asked": asked, "forwarded": forwarded, "states": states})
        print(found[-1], flush=True)
    return found


def state_bytes() -> list[Result]:
    """Bytes of the states, and of the K/V of a token, of default configurations in bfloat16."""
    found: list[Result] = []
    for model_type, name in FAMILIES.items():
        config = AutoConfig.for_model(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = PrivateCache(cache_layers(model))
        with torch.no_grad():
            try:
                run_model(model, torch.ones(1, 2, dtype=torch.long, device="meta"), cache)
            except (RuntimeError, ValueError) as error:  # no attention by default, or code that needs numbers
                print(f"{model_type}: {error}", flush=True)
                continue
        states = sum(s.nbytes for layer in cache.layers if hasattr(layer, "conv_states") for s in states_of(layer))
        tensors = [t for layer in cache.layers for t in (getattr(layer, n, None) for n in ("keys", "values"))]
        token = sum(t.nbytes for t in tensors if t is not None) // 2
        found.append({"type": model_type, "name": name, "state": states, "token": token})
        print(found[-1], flush=True)
    return found


def _in_tokens(sizes: Result) -> str:
    return f"{sizes['state'] / sizes['token']:,.0f}" if sizes["token"] else ""


def _times(row: Result) -> str:
    """The times without and with reuse, as two columns of a table."""
    return f"{row['plain']:.0f} ms | {row['reused']:.0f} ms ({row['reused'] / row['plain']:.2f})"


def markdown(result: Result) -> str:
    runs = result.get("provenances", [result["provenance"]])
    lines = [f"{result['model']}; {measured_on(runs[0])}", *map(measured_on, runs[1:]), ""]
    if edited := result.get("edits"):
        lines += [
            f"One token changed in a prompt of {TOKENS:,} that the cache has seen:",
            "",
            "| token | plain | reused | tokens forwarded | behind the edit |",
            "| ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [f"| {e['at']:,} | {_times(e)} | {e['forwarded']:,} | {e['least']:,} |" for e in edited]
    if chat := result.get("turns"):
        lines += ["", "A chat over one store, with a new cache each turn:", ""]
        lines += ["| turn | tokens | plain | reused | forwarded |", "| ---: | ---: | ---: | ---: | ---: |"]
        lines += [f"| {t['turn']} | {t['tokens']:,} | {_times(t)} | {t['forwarded']:,} |" for t in chat]
    if new := result.get("cold"):
        lines += ["", f"Prompts of {COLD_TOKENS:,} new tokens, each the first of a store:", ""]
        lines += ["| layers | width | plain | with a cache | states saved |", "| ---: | ---: | ---: | ---: | ---: |"]
        lines += [f"| {n['layers']} | {n['width']} | {_times(n)} | {n['states']} |" for n in new]
    if kept := result.get("rules"):
        reused = {(r["rule"], r["mb"]): 1 - r["forwarded"] / r["asked"] for r in kept}
        sizes_mb = sorted({r["mb"] for r in kept})
        lines += [
            "",
            f"Tokens that sessions of four agents reused, of {kept[0]['asked']:,}, by the size of the store:",
            "",
        ]
        lines += [f"| states at | {' | '.join(f'{mb} MB' for mb in sizes_mb)} |"]
        lines += ["| --- " + "| ---: " * len(sizes_mb) + "|"]
        for rule in dict.fromkeys(r["rule"] for r in kept):
            lines += [f"| {rule} | {' | '.join(f'{reused[rule, mb]:.1%}' for mb in sizes_mb)} |"]
    if sizes := result.get("bytes"):
        lines += ["", "| default configuration of | like | states | K/V of a token | states in tokens |"]
        lines += ["| --- | --- | ---: | ---: | ---: |"]
        lines += [
            f"| `{s['type']}` | {s['name']} | {s['state'] / 1e6:.1f} MB | {s['token'] / 1e3:.1f} kB "
            f"| {_in_tokens(s)} |"
            for s in sizes
        ]
    return "\n".join(lines) + "\n"


def figure(result: Result, path: Path) -> None:
    from matplotlib import pyplot

    drawn_on, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, rows, x, label in (
        (left, result["edits"], "at", f"changed token of a prompt of {TOKENS:,}"),
        (right, result["turns"], "turn", "turn of a chat"),
    ):
        places = [row[x] for row in rows]
        axis.plot(places, [row["plain"] / 1000 for row in rows], "o-", color="#999999", label="plain generate()")
        axis.plot(places, [row["reused"] / 1000 for row in rows], "o-", color="#0b6e4f", label="ChunkReuseCache")
        axis.set_xlabel(label)
        axis.set_ylabel("first token, s")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    drawn_on.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="edits, turns, cold, rules or bytes; all without")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--figure", type=Path, help="where to draw edits and turns")
    add_options(parser, rounds=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = options.parts or ["edits", "turns", "cold", "rules", "bytes"]
    result: Result = {
        "provenance": provenance(sys.argv[1:], "hybrids.py"),
        "model": f"Qwen3-Next, {options.layers} layers of width {options.width}, random, float32",
    }
    record = Record(f"hybrids-{options.device}", options, result, markdown)
    model = make(options.layers, options.width)
    work: dict[str, Callable[[], list[Result]]] = {
        "edits": partial(edits, model, options.rounds),
        "turns": partial(turns, model),
        "cold": partial(cold, options.rounds),
        "rules": rules,
        "bytes": state_bytes,
    }
    for part in parts:
        record.measure(part, lambda part=part: result.update({part: work[part]()}))
    if options.figure is not None and result.get("edits") and result.get("turns"):
        figure(result, options.figure)
    record.show()


if __name__ == "__main__":
    main()
