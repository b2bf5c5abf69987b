"""Prompts that an agent has edited: what is computed again, how long that takes, and what it does to the answer.

    PYTHONPATH=. python benchmarks/edits.py [quality] [long] [ways] --out benchmarks/results

The prompts are an agent's conversations of real text, in the chat template of SmolLM2-135M-Instruct: rules with a
clock and a counter, then thoughts, calls and the results of reading source files. Each trace is such a prompt and what
an agent makes of it (`EDITS`). A cache has seen the prompt; the clock runs while it answers the edited one with a
token.

`quality` compares ways to use what is stored with plain generate(), on SmolLM2. The plain answer is fed behind the
edited prompt; KL divergence and agreement are over its tokens. `long` measures time alone, in a random Llama, for
SmolLM2 has 8,192 positions. `ways` sends the same edits through a cache, attach(), KVBoost and the server, and has a
page of its own.

Seconds are those that one thread was computing, so that other work on the machine is not counted.
"""

import argparse
import difflib
import gc
import json
import logging
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from record import Record, add_options
from server_process import OURS, serving
from shapes import make_model
from targets import Result
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVBoost, ReusePolicy, attach, detach, last_cache
from kvboost_hf.assets.texts import Count, prose, source
from kvboost_hf.bench.run import provenance
from kvboost_hf.cache.planning.report import ReuseReport
from recipes.real_model import FLOAT32, load

Message = dict[str, str]

_RULES = (
    "You are a coding agent. You read files with read_file and answer questions about them. Read before you answer, "
    "and name the file that you mean."
)
_QUESTION = "What does the last file that you have read define? Answer in one or two sentences."
_NEW = 16  # tokens of an answer
_LONG = {  # far more layers than the two that "cacheblend" computes whole
    "vocab_size": 49_152,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}
POLICIES: dict[str, ReusePolicy] = {
    "exact": ReusePolicy(),
    "blend": ReusePolicy(mode="blend"),
    "blend, cacheblend": ReusePolicy(mode="blend", repair="cacheblend", recompute_ratio=0.15),
    "blend, selective": ReusePolicy(mode="blend", repair="selective"),
    "blend, none": ReusePolicy(mode="blend", repair="none"),
}


@dataclass(frozen=True, slots=True)
class Edit:
    """A prompt, and what an agent makes of it.

    Args:
        kind: What is edited.
        before: Token ids of the prompt that was seen.
        after: Token ids of the prompt that is asked next.
    """

    kind: str
    before: list[int]
    after: list[int]

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that the one before has nowhere, or in another order."""
        blocks = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False).get_matching_blocks()
        return len(self.after) - sum(block.size for block in blocks)


def conversation(tokens: int, count: Count) -> list[Message]:
    """An agent's conversation of about so many tokens: rules with a clock, then thoughts, calls and results."""
    results = source(max(192, tokens // 10), count)
    thoughts = prose(96, count)
    messages = [{"role": "system", "content": f"Time: 2024-05-17 09:41:07. Step 9. {_RULES}"}]
    messages.append({"role": "user", "content": "Read the files one by one, and remember what they define."})
    total = sum(count(message["content"]) + 8 for message in messages) + count(_QUESTION) + 16
    for result, thought in zip(results, thoughts, strict=False):
        name = result.split("\n", 1)[0].removeprefix("# ")
        step = [
            {"role": "assistant", "content": f"<think>\n{thought}\n</think>\nread_file({name!r})"},
            {"role": "user", "content": f"Result of read_file:\n{result}"},
        ]
        total += sum(count(message["content"]) + 8 for message in step)
        if total > tokens:
            break
        messages += step
    return [*messages, {"role": "user", "content": _QUESTION}]


def _in_head(old: str, new: str) -> Callable[[list[Message]], list[Message]]:
    return lambda messages: [_changed(messages[0], old, new), *messages[1:]]


def _changed(message: Message, old: str, new: str) -> Message:
    assert old in message["content"]
    return {**message, "content": message["content"].replace(old, new, 1)}


def _result_cut(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 3)
    return _with(messages, at, "Result of read_file:\n[removed to save room]")


def _result_replaced(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 3)
    lines = messages[at]["content"].split("\n")
    return _with(messages, at, "\n".join([*lines[: len(lines) // 2], "[the file ends here]"]))


def _without_thoughts(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message["content"].split("</think>\n")[-1]} for message in messages]


def _message_inserted(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 2) + 1
    note = {"role": "user", "content": "Note: two of the files were changed this morning. Go on with the next one."}
    return [*messages[:at], note, *messages[at:]]


def _line_edited(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 2)
    lines = messages[at]["content"].split("\n")
    middle = next(i for i in range(len(lines) // 2, len(lines)) if len(lines[i].split()) > 3)
    lines[middle] += "  # checked, and left as it was"
    return _with(messages, at, "\n".join(lines))


def _result(messages: list[Message], share: float) -> int:
    """The index of the result that stands at this share of the conversation."""
    at = int(len(messages) * share)
    return next(i for i in range(at, len(messages)) if messages[i]["content"].startswith("Result"))


def _with(messages: list[Message], at: int, content: str) -> list[Message]:
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


EDITS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "timestamp in the head": _in_head("09:41:07", "09:43:52"),
    "counter in the head, a digit longer": _in_head("Step 9.", "Step 10."),
    "result of a tool removed": _result_cut,
    "result of a tool cut in half": _result_replaced,
    "thinking taken out of the history": _without_thoughts,
    "message inserted in the middle": _message_inserted,
    "line of a file edited": _line_edited,
}


ONE_OF_EACH = [kind for kind in EDITS if "counter" not in kind and "half" not in kind]


def conversations(tokens: int, tokenizer: Any, kinds: Sequence[str]) -> dict[str, tuple[list[Message], list[Message]]]:
    """A conversation of about so many tokens, and what each kind of edit makes of it."""
    messages = conversation(tokens, lambda text: len(tokenizer(text)["input_ids"]))
    return {kind: (messages, EDITS[kind](messages)) for kind in kinds}


def traces(tokens: int, tokenizer: Any, kinds: Sequence[str]) -> list[Edit]:
    """The prompts of `conversations`."""

    def ids(messages: list[Message]) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    found = conversations(tokens, tokenizer, kinds)
    return [Edit(kind, ids(before), ids(after)) for kind, (before, after) in found.items()]


@torch.no_grad()
def first_token(model: PreTrainedModel, ids: list[int], cache: Any = None) -> tuple[float, Any]:
    """Seconds of computing up to the first token, and what generate() returns."""
    prompt = torch.tensor([ids])
    start = time.process_time()
    generate: Any = model.generate
    given = {} if cache is None else {"past_key_values": cache}
    out = generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **given,
    )
    return time.process_time() - start, out


@torch.no_grad()
def fed(model: PreTrainedModel, out: Any, answer: list[int]) -> torch.Tensor:
    """The logits of each token of an answer that is fed behind a prompt, [tokens, vocab]."""
    given = torch.tensor([answer[:-1]])
    more = model(input_ids=given, past_key_values=out.past_key_values).logits[0]
    return torch.cat([out.logits[0], more]).double()


@torch.no_grad()
def greedy(model: PreTrainedModel, out: Any) -> list[int]:
    """The answer that begins with the first token; its K/V is cut off again."""
    answer, cache = [int(out.logits[0][0].argmax())], out.past_key_values
    while len(answer) < _NEW and answer[-1] != model.config.eos_token_id:
        answer.append(int(model(input_ids=torch.tensor([answer[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
    cache.crop(-(len(answer) - 1))
    return answer


def seen_before(model: PreTrainedModel, before: list[int], seen: ChunkStore | None, policy: ReusePolicy) -> Any:
    """A cache of its own store that has seen a prompt, as it is after the prompt was computed."""
    store = ChunkStore(model)
    if seen is not None:  # computed once for all arms
        root = store.root(b"")
        for chunk in sorted(seen.inspect().chunks.values(), key=lambda chunk: chunk.start):
            assert root == chunk.root
            store.put(
                root, chunk.parent, chunk.start, chunk.tokens, chunk.nbytes - chunk.tokens.nbytes, partial(_kv, chunk)
            )
    cache = ChunkReuseCache(model, store, policy)
    first_token(model, before, cache)
    return cache


def _kv(chunk: Any) -> Any:
    return chunk.kv


def measure(model: PreTrainedModel, edit: Edit, seen: ChunkStore, policies: Sequence[str], *, answers: bool) -> Result:
    """Plain, and the ways of `POLICIES` that are named, to answer an edited prompt."""
    plain_s, plain = first_token(model, edit.after)
    answer = greedy(model, plain) if answers else []
    wanted = fed(model, plain, answer) if answers else None
    del plain
    row: Result = {"kind": edit.kind, "tokens": len(edit.after), "new_tokens": edit.new_tokens, "plain_s": plain_s}
    row["arms"] = {}
    for name in policies:
        cache = seen_before(model, edit.before, seen, POLICIES[name])
        seconds, out = first_token(model, edit.after, cache)
        report: ReuseReport = cache.report
        arm = row["arms"][name] = {"s": seconds, "forwarded": report.forwarded_tokens, "report": str(report)}
        if wanted is not None:
            p, q = wanted.log_softmax(-1), fed(model, out, answer).log_softmax(-1)
            arm["kl"] = float((p.exp() * (p - q)).sum(-1).mean())
            arm["agree"] = float((p.argmax(-1) == q.argmax(-1)).double().mean())
        print(f"{edit.kind}, {name}: {plain_s / seconds:.1f}x, {report}, KL {arm.get('kl')}", flush=True)
        del cache, out
        gc.collect()
    return row


class Size:
    """The edits of a conversation of some length, as they are measured one by one.

    Args:
        model: That answers.
        tokenizer: The tokenizer of the prompts.
        tokens: About so many.
        policies: The policies of `POLICIES`, by name.
        answers: Compare answers, too.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, tokens: int, policies: Sequence[str], *, answers: bool
    ) -> None:
        self._model, self._policies, self._answers = model, policies, answers
        self._edits = {edit.kind: edit for edit in traces(tokens, tokenizer, list(EDITS))}
        self._seen: ChunkStore | None = None
        self.rows: list[Result] = []

    def measure(self, kind: str) -> None:
        """Add the row of an edit."""
        edit = self._edits[kind]
        if self._seen is None:
            self._seen = seen_before(self._model, edit.before, None, ReusePolicy()).store
        self.rows.append(measure(self._model, edit, self._seen, self._policies, answers=self._answers))


def as_edits(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """What `ChunkReuseCache.edit` is to replace, so that the one text becomes the other."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(a, b, list(after[c:d])) for kind, a, b, c, d in blocks if kind != "equal"]


def measure_ways(model: PreTrainedModel, tokenizer: Any, tokens: int) -> list[Result]:
    """Tokens that each way in takes from what is stored, of the same edits."""
    policy = ReusePolicy(mode="blend")
    rows: list[Result] = []
    for kind, (before, after) in conversations(tokens, tokenizer, ONE_OF_EACH).items():
        ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in (before, after)]
        cache = seen_before(model, ids[0], None, policy)
        first_token(model, ids[1], cache)
        reused = {"a cache": cache.report.reused_tokens}
        cache = seen_before(model, ids[0], None, policy)
        cache.edit(replace=as_edits(ids[0], ids[1]))
        reused["edit()"] = cache.report.reused_tokens
        attach(model, policy=policy)
        for prompt in ids:
            first_token(model, prompt)
        reused["attach()"] = last_cache(model).report.reused_tokens
        detach(model)
        engine = KVBoost(model, tokenizer, policy=policy)
        for messages in (before, after):
            answer = engine.generate(messages, max_new_tokens=1)
        reused["KVBoost"] = answer.cached_tokens
        command = [*OURS, "--model", str(FLOAT32), "--model-name", "smollm2", "--repair", policy.repair]
        with serving(command) as server:
            for messages in (before, after):
                reused["the server"] = cached_tokens(server.port, messages)
        rows.append({"kind": kind, "tokens": len(ids[1]), "reused": reused})
        print(rows[-1], flush=True)
    return rows


def cached_tokens(port: int, messages: list[Message]) -> int:
    body = {"model": "smollm2", "messages": messages, "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def markdown(result: Result) -> str:
    lines = [f"{result['provenance']}", ""]
    for title, rows in result["sizes"].items():
        if rows:
            lines += [f"## {title}", "", *table(rows)]
    return "\n".join(lines) + "\n"


def ways_markdown(result: Result) -> str:
    lines = [f"Tokens reused of SmolLM2-135M-Instruct's prompts, through each way in; {result['provenance']}", ""]
    names = list(result["ways"][0]["reused"]) if result["ways"] else []
    lines += [f"| edit | tokens | {' | '.join(names)} |", f"| --- | ---: |{' ---: |' * len(names)}"]
    for row in result["ways"]:
        reused = " | ".join(f"{row['reused'][name]:,}" for name in names)
        lines.append(f"| {row['kind']} | {row['tokens']:,} | {reused} |")
    return "\n".join(lines) + "\n"


def table(rows: list[Result]) -> list[str]:
    quality = "kl" in rows[0]["arms"]["exact"]
    lines = [
        "| edit | new tokens of all | | TTFT | over plain | forwarded |" + (" KL | same choice |" if quality else ""),
        "| --- | ---: | --- | ---: | ---: | ---: |" + (" ---: | ---: |" if quality else ""),
    ]
    for row in rows:
        edit = f"{row['kind']} | {row['new_tokens']} of {row['tokens']:,}"
        end = " | 100.0% |" + (" | |" if quality else "")
        lines.append(f"| {edit} | plain | {row['plain_s']:.1f} s | {end}")
        for name, arm in row["arms"].items():
            speed, share = row["plain_s"] / arm["s"], arm["forwarded"] / row["tokens"]
            line = f"| | | {name} | {arm['s']:.2f} s | {speed:.1f}x | {share:.1%} |"
            lines.append(line + (f" {arm['kl']:.0e} | {arm['agree']:.0%} |" if quality else ""))
    lines.append("")
    for name in rows[0]["arms"]:
        speeds = [row["plain_s"] / row["arms"][name]["s"] for row in rows]
        lines.append(f"- {name}: {statistics.median(speeds):.1f}x in the median, {min(speeds):.1f}x at least")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="of quality, long, ways")
    add_options(parser)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=tuple(POLICIES), metavar="NAME")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 4000, 7800], help="of quality: tokens")
    parser.add_argument("--long", type=int, default=16_000, help="of long: tokens")
    parser.add_argument("--ways", type=int, default=800, help="of ways: tokens")
    options = parser.parse_args()
    if unknown := set(options.parts) - {"quality", "long", "ways"}:
        parser.error(f"parts must be of quality, long, ways, got {', '.join(sorted(unknown))}")
    parts = options.parts or ["quality", "long", "ways"]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model, tokenizer = load()
    where = str(provenance(f"`python benchmarks/edits.py {' '.join(sys.argv[1:])}`".replace(" `", "`"), "cpu"))
    sizes: list[tuple[str, PreTrainedModel, int]] = []
    if "quality" in parts:
        sizes += [(f"SmolLM2-135M-Instruct, about {tokens:,} tokens", model, tokens) for tokens in options.sizes]
    if "long" in parts:
        shape = f"{_LONG['num_hidden_layers']} layers of {_LONG['hidden_size']}"
        title = f"Random Llama of {shape}, float32, about {options.long:,} tokens: time alone"
        sizes.append((title, make_model("cpu", "small", **_LONG), options.long))
    if "ways" in parts:
        ways: Result = {"provenance": where, "ways": []}
        record = Record("edits-ways-cpu", options, ways, ways_markdown)
        record.measure("ways", lambda: ways["ways"].extend(measure_ways(model, tokenizer, options.ways)))
        record.show()
    result: Result = {"provenance": where, "sizes": {}}
    record = Record("edits-cpu", options, result, markdown)
    for title, answering, tokens in sizes:
        size = Size(answering, tokenizer, tokens, options.policies, answers=answering is model)
        result["sizes"][title] = size.rows
        for kind in ONE_OF_EACH:
            record.measure(f"{title}: {kind}", partial(size.measure, kind))
    if sizes:
        record.show()


if __name__ == "__main__":
    main()
