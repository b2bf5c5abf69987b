"""Drafts for a target whose layers come over a real link, on a real clock: `speculation.py --device cuda`.

The target has random AWQ weights with the layer shapes of Qwen2.5-32B, all of them streamed; the draft, those of
Qwen2.5-1.5B, stays on the device. Passes and what they cost are real. What they say is not, for random models agree
on nothing: both have their logits replaced behind each pass, the target's by a text, the draft's by the same text
with another token in place of some, by a seeded coin for each position. So every arm writes the same, and acceptance
is what was asked for. The draft gives each token the same probability, from which nothing can be learned.

A time goes from the call of generate() to its tokens on the host, prompt included. `load_assistant` begins in the dark
for each acceptance. T is the time of a token in plain decoding, D that of one of the draft alone, both taken right
before the arms of each acceptance; the bound is `committed per round * T / (T + drafted per round * D)`.
"""

import argparse
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from record import Record
from reuse import Ids, measured_on
from streaming import checkpoint, load
from targets import Result
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from what_fits import qwen

from kvboost_hf import StreamingConfig, load_assistant, speculation_stats, streaming_plan
from kvboost_hf.verify.measure import timed_generate

PROMPT = 128
ACCEPTANCES = (0.4, 0.6, 0.8)
ARMS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    **{f"length {n}": {"schedule": "constant", "num_assistant_tokens": n} for n in (5, 12, 20)},
}
WIDEST = 33  # tokens of a pass that checks a draft


@contextmanager
def saying(model: PreTrainedModel, text: list[int]) -> Iterator[None]:
    """`model` is certain of the tokens of a text, prompt included, wherever it is asked."""
    known = torch.tensor(text, device=model.device)

    def replace(_: torch.nn.Module, __: tuple[object, ...], output: Any) -> None:
        end = output.past_key_values.get_seq_length() + 1
        said = known[end - output.logits.shape[1] : end]
        output.logits.zero_()[0, : len(said)].scatter_(1, said[:, None], 1000.0)

    handle = model.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def partly(text: list[int], acceptance: float, seed: int) -> list[int]:
    """A text in which so many tokens, in the mean, are as they were."""
    coin = random.Random(seed)
    return [token if coin.random() < acceptance else token + 1 for token in text]


def texts(count: int, tokens: int) -> list[list[int]]:
    fresh = Ids(2)
    return [fresh(PROMPT + tokens + WIDEST) for _ in range(count)]


def seconds(model: PreTrainedModel, text: list[int], tokens: int, **kwargs: Any) -> float:
    call = timed_generate(model, text[:PROMPT], tokens, **kwargs)
    assert call.ids == text[PROMPT : PROMPT + tokens]
    return call.total_ms / 1000


def plain(target: PreTrainedModel, said: list[list[int]], tokens: int) -> float:
    total = 0.0
    for text in said:
        with saying(target, text):
            total += seconds(target, text, tokens)
    return total


def draft_s(draft: PreTrainedModel, tokens: int) -> float:
    """Seconds of a pass over one token."""
    call = timed_generate(draft, Ids(3)(PROMPT), tokens)
    return (call.total_ms - call.ttft_ms) / 1000 / (tokens - 1)


def arm(
    target: PreTrainedModel, draft: PreTrainedModel, said: list[list[int]], tokens: int, acceptance: float
) -> Result:
    total = 0.0
    for seed, text in enumerate(said):
        with saying(target, text), saying(draft, partly(text, acceptance, seed)):
            total += seconds(target, text, tokens, assistant_model=draft)
    stats = speculation_stats(draft)
    return {
        "seconds": total,
        "acceptance": stats.acceptance,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "committed_per_round": stats.committed_per_round,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "rollback_s": stats.rollback_s,
    }


def bounded(found: Result, plain_s: float, target_s: float, draft_s: float) -> Result:
    per_round = found["drafted"] / found["rounds"]
    speed_up = plain_s / found["seconds"]
    bound = found["committed_per_round"] * target_s / (target_s + per_round * draft_s)
    return {
        **found,
        "drafted_per_round": per_round,
        "speed_up": speed_up,
        "bound": bound,
        "of_bound": speed_up / bound,
    }


def make_draft(config: PreTrainedConfig, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    draft.generation_config.eos_token_id = None
    return draft


def warm_up(model: PreTrainedModel) -> None:
    """Compiles, for each width that a pass may have."""
    for width in (*range(1, WIDEST + 1), PROMPT, PROMPT + WIDEST):
        model(torch.tensor([Ids(4)(width)], device=model.device))


def measure_link(options: argparse.Namespace, where: Result) -> None:
    """All acceptances and arms."""
    tiny = options.shape == "tiny"
    target_config = qwen(256, 512, 4, 4, 2) if tiny else qwen(5120, 27_648, options.layers, 40, 8)
    draft_config = qwen(128, 256, 1, 2, 1) if tiny else qwen(1536, 8960, 28, 12, 2)
    if tiny:
        target_config.vocab_size = draft_config.vocab_size = 1024
    said, tokens = texts(options.texts, options.tokens), options.tokens
    link: Result = {"layers": target_config.num_hidden_layers, "tokens": len(said) * tokens, "plain": {}, "arms": {}}
    record = Record("speculation-link", options, {"provenance": where, "link": link}, link_markdown)
    with checkpoint(target_config, options.folder) as path:
        target = load(path, StreamingConfig(residency_mode="full_stream", max_tokens=2048), options.device)
        draft = make_draft(draft_config, options.device)
        plan = streaming_plan(target)
        link["streamed_bytes"] = plan.streamed_bytes if plan is not None else 0

        def measure_plain(acceptance: float) -> None:
            plain_s = plain(target, said, tokens)
            link["plain"][acceptance] = {
                "seconds": plain_s,
                "target_s": plain_s / (len(said) * tokens),
                "draft_s": draft_s(draft, tokens),
            }

        def measure(name: str, acceptance: float) -> None:
            before = link["plain"][acceptance]
            assistant = load_assistant(draft, target=target, **ARMS[name])
            found = arm(target, assistant, said, tokens, acceptance)
            found = bounded(found, before["seconds"], before["target_s"], before["draft_s"])
            link["arms"][f"{name}, {acceptance:.0%}"] = found
            print(f"{name}, {acceptance:.0%}: {found['speed_up']:.2f}x of {found['bound']:.2f}x")

        record.measure("warming up", lambda: [warm_up(model) for model in (target, draft)])
        for acceptance in ACCEPTANCES:
            record.measure(f"plain, {acceptance:.0%}", partial(measure_plain, acceptance))
            for name in ARMS:
                record.measure(f"{name}, {acceptance:.0%}", partial(measure, name, acceptance))
    record.show()


def link_markdown(result: Result) -> str:
    link = result["link"]
    lines = [
        measured_on(result["provenance"]),
        "",
        f"{link['layers']} layers of the target, {link['streamed_bytes'] / 1e9:.2f} GB of them copied for each pass. "
        f"{link['tokens']} tokens in each arm.",
        "",
    ]
    if found := list(link["plain"].values()):
        target_ms, draft_ms = (1000 * statistics.median(row[key] for row in found) for key in ("target_s", "draft_s"))
        lines += [f"A token takes {target_ms:.1f} ms in plain decoding, {draft_ms:.1f} ms in the draft.", ""]
    lines += [
        "| drafts, acceptance of each token | accepted | drafted per round | committed per round | verifying, a round "
        "| rolling back | speed-up | bound | of it |",
        "| --- |" + " ---: |" * 8,
    ]
    for name, one in link["arms"].items():
        verify_ms, rollback_ms = (1000 * one[key] / one["rounds"] for key in ("verify_s", "rollback_s"))
        lines.append(
            f"| {name} | {one['acceptance']:.0%} | {one['drafted_per_round']:.1f} | {one['committed_per_round']:.2f} "
            f"| {verify_ms:.1f} ms | {rollback_ms:.2f} ms | {one['speed_up']:.2f}x | {one['bound']:.2f}x "
            f"| {one['of_bound']:.0%} |"
        )
    return "\n".join(lines) + "\n"
