"""Exact reuse against plain generate(), against what a knowing user would write by hand, and against kvboost 0.9.0.

    python benchmarks/reuse.py --out benchmarks/results [--device cuda] [--shape 8b] [--peer-python PYTHON]

All arms of a comparison run in turn within one loop; figures are medians, speed is given as ratios within the run.
The time to the first token is that from the call of generate() to the token on the host (the device is synchronized
by reading it), storing and filling included. Each timed prompt has an ending that was never seen before. One untimed
round of every arm comes first; in it our cache runs its probe of the model (two short forwards, once per model).

The model is a random Llama of 8 layers, 512 wide, in float32: large enough that compute dominates on a CPU.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Record, add_options, add_shape
from shapes import SHAPES, Shape, make_model
from targets import Result
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.assets.texts import encode
from kvboost_hf.bench import run as bench
from kvboost_hf.bench.prompts import CHAT_SHAPE, chat_turn
from kvboost_hf.cache.kv.layer_kv import LayerKV, LayerKVReader
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import prefix_key
from kvboost_hf.verify.measure import timed_generate

PROMPT, SHARED = 2000, 1800  # of the peer


class Ids:
    """Fresh random ids."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, n: int) -> list[int]:
        return self._rng.integers(2, 1000, n).tolist()


def in_turn(
    arms: dict[str, Callable[[int], float]], rounds: int, failed: dict[str, Exception] | None = None
) -> dict[str, list[float]]:
    """Times in ms of each arm; round -1 is not timed, and each round starts with another arm.

    Args:
        arms: By name, what returns its time in a round.
        rounds: That are timed.
        failed: Gets the exceptions of arms, by name; the others go on. By default an exception ends all.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for n in range(-1, rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            if name not in times:
                continue
            try:
                ms = arms[name](n)
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = error.with_traceback(None)  # whose frames would hold what the arm had on the device
                del times[name]
                continue
            if n >= 0:
                times[name].append(ms)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def prefilled(model: PreTrainedModel, ids: list[int], rows: int = 1) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([ids] * rows, device=model.device), past_key_values=cache, logits_to_keep=1)
    return cache


def floor(model: PreTrainedModel, held: DynamicCache, ending: list[int]) -> float:
    """ms of one bare forward of `ending` over what a cache holds, to the token on the host; the cache is cut back."""
    ids = torch.tensor([ending], device=model.device)
    start = time.perf_counter()
    with torch.no_grad():
        out = model(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=1)
    out.logits[0, -1].argmax().item()
    ms = 1000 * (time.perf_counter() - start)
    held.crop(-len(ending))
    return ms


def ttft(model: PreTrainedModel, ids: list[int], **kwargs: Any) -> float:
    return timed_generate(model, ids, 1, **kwargs).ttft_ms


def warm_prompts(model: PreTrainedModel, shape: Shape, prompt: int, rounds: int) -> list[Result]:
    """Nine tenths of a prompt seen before, and from 8 tokens to the last tenth of it that were not."""
    fresh, results = Ids(1), []
    shared = fresh(prompt * 9 // 10)
    for unseen in (8, 32, 100, prompt - len(shared)):
        endings = {n: fresh(unseen) for n in range(-1, rounds)}
        held = prefilled(model, shared)
        store = shape.new_store(model)
        store.warm(shared)
        kept = ChunkReuseCache(model, shape.new_store(model))

        def by_hand(n: int) -> float:
            start = time.perf_counter()
            mine = copy.deepcopy(held)
            copied = 1000 * (time.perf_counter() - start)
            return copied + ttft(model, shared + endings[n], past_key_values=mine)

        arms = {
            "plain": lambda n: ttft(model, shared + endings[n]),
            "floor": lambda n: floor(model, held, endings[n]),
            "deepcopy": by_hand,
            "live": lambda n: ttft(model, shared + endings[n], past_key_values=kept),
            "store": lambda n: ttft(model, shared + endings[n], past_key_values=ChunkReuseCache(model, store)),
        }
        found = medians(in_turn(arms, rounds))
        fill = fill_ms(model, store, shared)
        results.append({"seen": len(shared), "unseen": unseen, "fill_copy_ms": fill, **found})
        print(f"warm, {unseen} unseen: {rounded(found)}, copying the fill alone {fill:.1f} ms", flush=True)
    return results


def fill_ms(model: PreTrainedModel, store: ChunkStore, ids: list[int]) -> float:
    """What it costs to copy the stored K/V of `ids` into fresh buffers, and nothing else."""
    chunks = sorted(store.inspect().chunks.values(), key=lambda chunk: chunk.start)[: -(-len(ids) // 128)]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        copies = [
            torch.cat([LayerKVReader(chunk.kv).layer(layer)[kind] for chunk in chunks], dim=1).to(model.device)
            for layer in range(model.config.num_hidden_layers)
            for kind in (0, 1)
        ]
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
        del copies
    return statistics.median(times)


def cold_prompts(model: PreTrainedModel, shape: Shape, rounds: int) -> list[Result]:
    """Nothing was ever seen."""
    fresh, results = Ids(2), []
    for n_tokens in (200, *shape.prompts):
        prompts = {n: fresh(n_tokens) for n in range(-1, rounds)}
        arms = {
            "plain": lambda n: ttft(model, prompts[n]),
            "cold": lambda n: ttft(model, prompts[n], past_key_values=ChunkReuseCache(model, shape.new_store(model))),
        }
        found = medians(in_turn(arms, rounds))
        results.append({"prompt": n_tokens, **found})
        print(f"cold, {n_tokens} tokens: {rounded(found)}", flush=True)
    return results


def chat(model: PreTrainedModel, rounds: int) -> list[Result]:
    """Prompts of the published shape; answers of 24 tokens go back as the tokens that they were."""
    fresh = Ids(3)
    rows: list[dict[str, list[float]]] = [{"plain": [], "reuse": []} for _ in CHAT_SHAPE]
    counts: list[tuple[int, int]] = []
    for n in range(-1, rounds):
        cache, history = ChunkReuseCache(model, ChunkStore(model)), []  # type: ignore[var-annotated]
        counts = []
        for turn, length in enumerate(CHAT_SHAPE):
            history += fresh(length - len(history))
            plain = timed_generate(model, history, 24)
            reuse = timed_generate(model, history, 24, past_key_values=cache)
            assert plain.ids == reuse.ids or model.dtype != torch.float32  # others round differently
            counts.append((cache.report.prompt_tokens, cache.report.forwarded_tokens))
            history += plain.ids
            if n >= 0:
                rows[turn]["plain"].append(plain.ttft_ms)
                rows[turn]["reuse"].append(reuse.ttft_ms)
    results = [
        {"turn": turn + 1, "prompt": prompt, "forwarded": forwarded, **medians(row)}
        for turn, (row, (prompt, forwarded)) in enumerate(zip(rows, counts, strict=True))
    ]
    print(f"chat, turn 8: {rounded(medians(rows[-1]))}", flush=True)
    return results


def decode(model: PreTrainedModel, rounds: int) -> list[Result]:
    """Tokens per second after a long prompt."""
    fresh, results = Ids(4), []
    for context in (512, 8192):
        ids = fresh(context)
        cache = ChunkReuseCache(model, ChunkStore(model))
        timed_generate(model, ids, 1, past_key_values=cache)
        held = prefilled(model, ids[:-1])
        steps = 48

        def speed(kwargs: dict[str, Any], steps: int = steps, ids: list[int] = ids) -> float:
            call = timed_generate(model, ids, steps + 1, **kwargs)
            return (call.total_ms - call.ttft_ms) / steps

        arms = {
            "stock": lambda _: speed({"past_key_values": copy.deepcopy(held)}),
            "reuse": lambda _: speed({"past_key_values": cache}),
        }
        found = medians(in_turn(arms, rounds))
        results.append({"context": context, **{f"{name}_tok_s": 1000 / ms for name, ms in found.items()}})
        print(f"decode at {context}: ms per token {rounded(found)}", flush=True)
    return results


def planning(model: PreTrainedModel) -> Result:
    """A prompt of 100k tokens against a store of 10k chunks, a third of the prompt stored."""
    store = ChunkStore(model)
    rng = np.random.default_rng(5)
    root = store.root(b"")
    kv = LayerKV((), ())
    prompt = rng.integers(2, 1000, (1, 100_000))
    stored = 0
    while stored < 10_000:
        row = prompt[0, :33_280] if stored == 0 else rng.integers(2, 1000, 128 * 20)
        key = root
        for start in range(0, len(row), 128):
            tokens = row[start : start + 128]
            store.put(root, key, start, tokens, 0, lambda: kv)
            key = prefix_key(key, tokens)
            stored += 1
    times = []
    for _ in range(11):
        start = time.perf_counter()  # type: ignore[assignment]
        plan = Ledger.empty(np.zeros(1, dtype=np.int64), store.root(b"")).plan(
            prompt, 0, 99_999, store, 64, stateful=False
        )
        times.append(1000 * (time.perf_counter() - start))
    assert plan.filled == 33_280
    result = {"prompt": 100_000, "chunks": stored, "hit": plan.filled, "ms": statistics.median(times)}
    print(f"planning: {result}", flush=True)
    return result


def peer(model: PreTrainedModel, python: str, rounds: int) -> Result:
    """kvboost 0.9.0 in its own interpreter, on the same model and prompts, right after our own arms."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fresh = Ids(6)
    shared, ending, cold = fresh(SHARED), fresh(PROMPT - SHARED), fresh(PROMPT)

    def text(ids: list[int]) -> str:
        return " ".join(f"t{i}" for i in ids)

    tokens = Tokenizer(models.WordLevel({f"t{i}": i for i in range(1024)}))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens)  # a special token would be matched inside words
    held = prefilled(model, shared)

    def by_hand(_: int) -> float:
        start = time.perf_counter()
        mine = copy.deepcopy(held)
        return 1000 * (time.perf_counter() - start) + ttft(model, shared + ending, past_key_values=mine)

    caches: dict[str, ChunkReuseCache] = {}

    def ours(name: str, ids: list[int], seen: list[int]) -> float:
        caches[name] = cache = ChunkReuseCache(model, ChunkStore(model))
        if seen:  # as the peer's engine is primed, out of the clock
            timed_generate(model, seen, 1, past_key_values=cache)
        return ttft(model, ids, past_key_values=cache)

    arms = {
        "plain": lambda _: ttft(model, shared + ending),
        "deepcopy": by_hand,
        "warm": lambda _: ours("warm", shared + ending, shared),
        "cold_plain": lambda _: ttft(model, cold),
        "cold": lambda _: ours("cold", cold, []),
    }
    found = medians(in_turn(arms, rounds))
    forwarded = {name: cache.report.forwarded_tokens for name, cache in caches.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        workload = {
            "max_new_tokens": 1,
            "cases": [
                {"name": "warm", "prime": [text(shared)], "prompt": text(shared + ending), "repeats": rounds},
                {"name": "cold", "prime": [], "prompt": text(cold), "repeats": rounds},
            ],
            "answers": {"max_new_tokens": 1, "prompts": []},
        }
        speed = run_peer(python, workload, folder, model.device.type)
    assert all(case["prompt_tokens"] == PROMPT for case in speed["cases"])
    answers = peer_answers(python)
    return {"ours": found, "ours_forwarded": forwarded, "peer": speed, "answers": answers}


def peer_answers(python: str) -> Result:
    """Equal answers on the trained embedded model: chats, in which text recurs in other places, too."""
    reader, tokenizer = load_embedded()
    prompts: list[list[int]] = []
    for seed in range(3):
        messages: list[dict[str, str]] = []
        documents: list[Any] = []
        for turn, target in enumerate(CHAT_SHAPE):
            question, document = chat_turn(tokenizer, messages, documents, target, seed=100 * seed + turn)
            documents.append(document)
            messages.append({"role": "user", "content": question.text})
            prompts.append(encode(tokenizer, messages))
            messages.append({"role": "assistant", "content": question.fact.answer})
    cache = ChunkReuseCache(reader)
    answers = [timed_generate(reader, ids, 16).ids for ids in prompts]
    forwarded = 0

    def count(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
        nonlocal forwarded
        forwarded += args[0].numel()

    handle = reader.get_input_embeddings().register_forward_hook(count)
    reused = [timed_generate(reader, ids, 16, past_key_values=cache).ids for ids in prompts]
    handle.remove()
    texts = [tokenizer.decode(ids) for ids in prompts]
    workload = {"max_new_tokens": 1, "cases": [], "answers": {"max_new_tokens": 16, "prompts": texts}}
    found = run_peer(python, workload, str(EMBEDDED_MODEL_DIR), "cpu")
    return {
        "prompts": len(prompts),
        "ours_equal": sum(a == b for a, b in zip(answers, reused, strict=True)),
        "ours_forwarded": forwarded,
        "peer": found["answers"],
    }


def run_peer(python: str, workload: Result, model_dir: str, device: str) -> Result:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        script = Path(__file__).with_name("kvboost_peer.py")
        command = [python, str(script), "--workload", file.name, "--model", model_dir]
        command += ["--threads", str(torch.get_num_threads()), "--device", device]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: Result = json.loads(done.stdout)
    return result


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def provenance(arguments: list[str], script: str = "reuse.py") -> Result:
    """What a run was made with, for its JSON."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_known_args(arguments)[0].device
    return asdict(bench.provenance(" ".join(["python", f"benchmarks/{script}", *arguments]), device))


def measured_on(where: Result) -> str:
    """The machine, the versions and the command of a run, in two lines."""
    versions = where["versions"]
    return (
        f"{where['hardware']}, {where['threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit {where['commit']}:\n`{where['command']}`"
    )


def markdown(result: Result) -> str:
    """The tables for README and docs."""
    lines = [
        f"{result['shape']}; {measured_on(result['provenance'])}",
        "",
        "| tokens seen before, and unseen | plain | floor | by hand (deep copy) | ours, live "
        "| ours, from the store | live / floor | store / floor |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["warm"]:
        plain = row["plain"]
        lines.append(
            f"| {row['seen']:,} and {row['unseen']} | {plain:.0f} ms (1x) | {row['floor']:.1f} ms "
            f"| {row['deepcopy']:.1f} ms ({plain / row['deepcopy']:.1f}x) "
            f"| {row['live']:.1f} ms ({plain / row['live']:.1f}x) "
            f"| {row['store']:.1f} ms ({plain / row['store']:.1f}x) "
            f"| {row['live'] / row['floor']:.2f} | {row['store'] / row['floor']:.2f} |"
        )
    lines += ["", "| other | figure |", "| --- | ---: |"]
    for row in result["cold"]:
        lines.append(f"| cold prompt of {row['prompt']} tokens, against plain | {row['cold'] / row['plain']:.3f} |")
    for turn in result["chat"][-1:]:
        lines.append(f"| chat, turn 8 ({turn['prompt']} tokens), speed-up | {turn['plain'] / turn['reuse']:.1f}x |")
    for row in result["decode"]:
        ratio = row["reuse_tok_s"] / row["stock_tok_s"]
        lines.append(f"| decoding after {row['context']} tokens, against DynamicCache | {ratio:.2f}x |")
    if plan := result.get("planning"):
        lines.append(f"| planning {plan['prompt']} tokens against {plan['chunks']} chunks | {plan['ms']:.1f} ms |")
    if "kvboost" in result:
        lines += ["", *kvboost_table(result["kvboost"])]
    return "\n".join(lines) + "\n"


def kvboost_table(found: Result) -> list[str]:
    """Time to the first token against plain generate() of the same process, and tokens forwarded up to it."""
    lines = [
        "| beside kvboost 0.9.0 | warm: TTFT | forwarded | cold: TTFT | forwarded | cold: until it returns |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    ours, forwarded = found["ours"], found["ours_forwarded"]
    warm, cold = ours["plain"] / ours["warm"], ours["cold_plain"] / ours["cold"]
    lines.append(
        f"| kvboost_hf | {warm:.2f}x | {forwarded['warm']} | {cold:.2f}x | {forwarded['cold']} | {cold:.2f}x |"
    )
    lines.append(f"| deep-copied DynamicCache | {ours['plain'] / ours['deepcopy']:.2f}x | | | | |")
    cases = {(case["case"], case["method"]): case for case in found["peer"]["cases"]}
    base = {name: statistics.median(cases[name, "plain"]["first_token_ms"]) for name in ("warm", "cold")}
    for method in ("none", "selective", "cacheblend"):
        warm_case, cold_case = cases["warm", method], cases["cold", method]
        lines.append(
            f"| kvboost, {method} | {base['warm'] / statistics.median(warm_case['first_token_ms']):.2f}x "
            f"| {warm_case['forwarded_to_first_token']} "
            f"| {base['cold'] / statistics.median(cold_case['first_token_ms']):.2f}x "
            f"| {cold_case['forwarded_to_first_token']} "
            f"| {base['cold'] / statistics.median(cold_case['generate_ms']):.2f}x |"
        )
    answers = found["answers"]
    lines += [
        "",
        f"Answers equal to plain generate() in {answers['prompts']} prompts of chats on the embedded model, and "
        f"tokens forwarded, decoding included: kvboost_hf {answers['ours_equal']} ({answers['ours_forwarded']}); "
        + "; ".join(
            f"kvboost {row['method']} {row['equal']} ({row['forwarded_tokens']})"
            for row in answers["peer"]
            if row["method"] not in ("plain", "baseline")
        )
        + ".",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=15)
    add_shape(parser, "small")
    parser.add_argument("--peer-python", help="an interpreter with kvboost 0.9.0, torch and transformers")
    options = parser.parse_args()
    shape, rounds = SHAPES[options.shape], options.rounds
    model = make_model(options.device, options.shape)
    arguments = ["PEER_PYTHON" if a == options.peer_python else a for a in sys.argv[1:]]
    result: Result = {"provenance": provenance(arguments), "shape": shape.describe(), "warm": []}
    result |= {"cold": [], "chat": [], "decode": []}
    record = Record(f"reuse-{options.device}", options, result, markdown)
    for prompt in shape.prompts:
        record.measure(f"warm, {prompt}", lambda: result["warm"].extend(warm_prompts(model, shape, prompt, rounds)))
    record.measure("cold", lambda: result["cold"].extend(cold_prompts(model, shape, rounds)))
    record.measure("chat", lambda: result["chat"].extend(chat(model, max(1, rounds // 3))))
    record.measure("decode", lambda: result["decode"].extend(decode(model, rounds)))
    record.measure("planning", lambda: result.update(planning=planning(model)))
    if options.peer_python:
        python = options.peer_python
        record.measure("kvboost", lambda: result.update(kvboost=peer(model, python, max(1, rounds // 3))))
    record.show()


if __name__ == "__main__":
    main()
