"""Sessions of agents whose history is edited between requests: tokens reused, right answers, time of whole answers.

    PYTHONPATH=. python benchmarks/transcripts.py [tools] [notes] --out benchmarks/results

A session is made of real tools' outputs, about the files of this package as they are committed: `wc -l`, `grep -n`,
`sed -n`, `git log` and tracebacks, drawn by a seed, with a note in each. It has several requests. Before each, its
history is edited as agents edit theirs (`EDITS`), a result is added, and a question is asked about the note of a
result that is still there: the answer is known. It begins with words that leave one word to say, for a small model.
`notes` are sessions of the embedded reader, whose chats hold notes in templated English.

Each way has answered the requests before, in a store of its session. An answer is right if it has the known word. The
prefix that a request shares with an earlier one is counted, not run: that is what exact reuse finds. Seconds are those
that one thread was computing.
"""

import argparse
import hashlib
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from edits import as_edits
from record import Record, add_options
from targets import Result

import kvboost_hf
from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.world import SYSTEM_PROMPT, make_documents
from kvboost_hf.bench.run import provenance
from recipes.real_model import load

Message = dict[str, str]
_PACKAGE = Path(kvboost_hf.__file__).parent
_RULES = (
    "You are a coding agent. You run commands, one at a time, and read what they print. Answer questions about the "
    "results that you have seen, in one line."
)
_STUB = "[result dropped: it was answered from]"
BLEND = ReusePolicy(mode="blend")
WAYS: dict[str, ReusePolicy | None] = {
    "plain": None,
    "blend": BLEND,
    "blend, not progressive": replace(BLEND, progressive=False),
    "blend, selective": replace(BLEND, repair="selective", progressive=False),
    "edit(), not progressive": replace(BLEND, progressive=False),
    "edit(), selective": replace(BLEND, repair="selective", progressive=False),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a tool, what it returned, and what can be asked about that.

    Args:
        call: The command.
        result: What it printed.
        question: About it.
        stub: How the answer begins.
        answer: How it goes on.
    """

    call: str
    result: str
    question: str
    stub: str
    answer: str


@dataclass(frozen=True, slots=True)
class Request:
    """The prompt of a request, and the word that a right answer has."""

    ids: list[int]
    answer: str


@dataclass(frozen=True, slots=True)
class Session:
    """The requests of a session, and how its history is edited between them."""

    kind: str
    requests: list[Request]


# Tools


@cache
def _files() -> dict[str, list[str]]:
    """The lines of each module of the package, by its path."""
    paths = sorted(path for path in _PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
    found = {str(path.relative_to(_PACKAGE)): path.read_text().splitlines() for path in paths}
    return {name: lines for name, lines in found.items() if len(lines) > 40}


def count_lines(rng: random.Random) -> tuple[str, list[str]]:
    names = rng.sample(list(_files()), 12)
    return "wc -l (12 files)", [f"{len(_files()[name]):6d} kvboost_hf/{name}" for name in names]


def grep(rng: random.Random) -> tuple[str, list[str]]:
    found = [
        f"kvboost_hf/{name}:{at}:{line.strip()}"
        for name, lines in _files().items()
        for at, line in enumerate(lines, 1)
        if line.startswith(("class ", "def "))
    ]
    return "grep -n -E '^(class|def) '", rng.sample(found, 7)


def read_file(rng: random.Random) -> tuple[str, list[str]]:
    name = rng.choice(list(_files()))
    lines = _files()[name]
    at = rng.randrange(len(lines) - 14)
    return f"sed -n {at + 1},{at + 14}p kvboost_hf/{name}", lines[at : at + 14]


def git_log(rng: random.Random) -> tuple[str, list[str]]:
    subjects = rng.sample(sorted({lines[0].strip('"')[:72] for lines in _files().values()}), 7)
    return "git log --oneline", [f"{hashlib.sha1(each.encode()).hexdigest()[:7]} {each}" for each in subjects]


def run_program(rng: random.Random) -> tuple[str, list[str]]:
    """A traceback through lines of the package."""
    rows = ["Traceback (most recent call last):"]
    for name in rng.sample(list(_files()), 3):
        lines = _files()[name]
        at = rng.choice([at for at, line in enumerate(lines) if line.startswith("    return ")] or [len(lines) - 1])
        rows += [f'  File "kvboost_hf/{name}", line {at + 1}, in <module>', f"    {lines[at].strip()}"]
    return "python program.py", [*rows, "ValueError: the value is not allowed here"]


TOOLS: tuple[Callable[[random.Random], tuple[str, list[str]]], ...] = (
    count_lines,
    grep,
    read_file,
    git_log,
    run_program,
)
# What can be asked about: each result has one such line, and no session has one of them twice.
NOTES: dict[str, str] = {
    "The password of the printer is": "orange banana cherry lemon melon",
    "The meeting of the team is on": "Monday Tuesday Wednesday Thursday Friday",
    "The server of the customer stands in": "Paris London Madrid Vienna Dublin",
    "The new driver of the bus is": "Anna Peter Maria Simon Laura",
    "The colour of the old logo was": "purple yellow green silver brown",
    "The animal on the first slide is a": "tiger horse rabbit camel dolphin",
    "The language of the old manual is": "Greek French Dutch Polish Swedish",
    "The next stop of the tour is": "Tokyo Boston Cairo Lima Sydney",
    "The instrument in the lobby is a": "piano violin guitar trumpet cello",
    "The fruit in the basket is a": "pear plum mango peach grape",
    "The month of the next release is": "January March April June October",
    "The material of the table is": "wood glass steel stone leather",
}


def steps_of(rng: random.Random, count: int) -> list[Step]:
    """Calls of tools in an order that is drawn, each with a note in its result."""
    tools = [TOOLS[at % len(TOOLS)] for at in range(count)]
    rng.shuffle(tools)
    found: list[Step] = []
    for tool, stub in zip(tools, rng.sample(list(NOTES), count), strict=True):
        call, lines = tool(rng)
        answer, at = rng.choice(NOTES[stub].split()), rng.randrange(1, len(lines))
        result = "\n".join([*lines[:at], f"# Note: {stub} {answer}.", *lines[at:]])
        found.append(Step(call, result, f"What do the notes say? {stub} ...", stub, answer))
    return found


# Edits


@dataclass(slots=True)
class History:
    """What an agent keeps of a session.

    Args:
        rules: The system prompt.
        steps: The calls and results so far, and whether the result is still there.
        said: Questions and answers, by the step that they came after.
    """

    rules: str
    steps: list[tuple[Step, bool]]
    said: dict[int, list[Message]]
    clock: str = ""
    memories: tuple[str, ...] = ()
    summary: tuple[int, str] = (0, "")  # of the first steps

    def messages(self) -> list[Message]:
        notes = "".join(f"Memory: {memory}\n" for memory in self.memories)
        found = [{"role": "system", "content": f"{self.clock}{notes}{self.rules}"}]
        done, text = self.summary
        if done:
            found.append({"role": "user", "content": text})
        for at, (step, kept) in enumerate(self.steps):
            if at >= done:
                found.append({"role": "assistant", "content": f"$ {step.call}"})
                found.append({"role": "user", "content": f"Result {at + 1}:\n{step.result if kept else _STUB}"})
                found += self.said.get(at, [])
        return found

    def open_steps(self) -> list[Step]:
        """The steps whose results are still there."""
        return [step for at, (step, kept) in enumerate(self.steps) if kept and at >= self.summary[0]]


def _clock(history: History, turn: int) -> None:
    history.clock = f"Time: 2026-05-17 09:{40 + 2 * turn}:07. Request {turn + 9}.\n"


def _drop_results(history: History, turn: int) -> None:
    """The two oldest results that are still there."""
    for at in range(2 * turn):
        history.steps[at] = history.steps[at][0], False


def _summarize(history: History, turn: int) -> None:
    done = 2 * turn
    if done:
        calls = ", ".join(step.call for step, _ in history.steps[:done])
        history.summary = done, f"Summary of the first {done} steps: {calls} were run, and their results were read."


def _remember(history: History, turn: int) -> None:
    history.memories = tuple(
        f"the user has asked about {step.call} before, and wanted short answers." for step, _ in history.steps[:turn]
    )


def _all(history: History, turn: int) -> None:
    _clock(history, turn)
    _drop_results(history, turn)
    _remember(history, turn)


EDITS: dict[str, Callable[[History, int], None]] = {
    "clock in the head": _clock,
    "results dropped": _drop_results,
    "summary of the first steps": _summarize,
    "memories injected": _remember,
    "all of these": _all,
}


# Sessions


def tool_sessions(
    tokenizer: Any, kinds: Sequence[str], per_kind: int, turns: int, steps: int, seed: int
) -> Iterator[Session]:
    for kind in kinds:
        edit = EDITS[kind]
        for number in range(per_kind):
            rng = random.Random(f"{seed} {kind} {number}")
            made = steps_of(rng, steps + turns - 1)
            history = History(_RULES, [(step, True) for step in made[:steps]], {})
            requests: list[Request] = []
            for turn in range(turns):
                edit(history, turn)
                step = rng.choice(history.open_steps())
                messages = [*history.messages(), {"role": "user", "content": step.question}]
                ids = [*_encoded(tokenizer, messages), *tokenizer(step.stub, add_special_tokens=False).input_ids]
                requests.append(Request(ids, step.answer))
                answer = f"{step.stub} {step.answer}"
                said = [{"role": "user", "content": step.question}, {"role": "assistant", "content": answer}]
                history.said[len(history.steps) - 1] = said
                history.steps += [(each, True) for each in made[steps + turn : steps + turn + 1]]
            yield Session(kind, requests)


def note_sessions(
    tokenizer: Any, kinds: Sequence[str], per_kind: int, turns: int, notes: int, seed: int
) -> Iterator[Session]:
    """As `tool_sessions`, in the words of the embedded reader: a chat with notes, which come, go and are cut."""
    for kind in kinds:
        for number in range(per_kind):
            rng = random.Random(f"{seed} {kind} {number}")
            made = make_documents(rng, notes + 2 * turns, num_words=60)
            held, more = list(made[:notes]), list(made[notes:])
            requests: list[Request] = []
            for turn in range(turns):
                clock, head = "", list[str]()
                if kind in ("clock in the head", "all of these"):
                    clock = f"It is {9 + turn} and {40 + turn}. "
                if turn and kind in ("results dropped", "all of these"):
                    held = held[1:]
                if turn and kind in ("memories injected", "all of these"):
                    held = [more.pop(), *held]
                if turn and kind == "summary of the first steps":
                    held = held[1:]
                    head = [made[at].text.split(". ")[0] + "." for at in range(turn)]
                fact = rng.choice(rng.choice(held).facts)
                text = "\n\n".join([*head, *(note.text for note in held), fact.question])
                messages = [
                    {"role": "system", "content": f"{clock}{SYSTEM_PROMPT}"},
                    {"role": "user", "content": text},
                ]
                requests.append(Request(_encoded(tokenizer, messages), fact.value))
                held.append(more.pop(0))
            yield Session(kind, requests)


def _encoded(tokenizer: Any, messages: list[Message]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


# Measuring


def shared(requests: Sequence[Request], at: int) -> int:
    """First tokens of a request that an earlier one begins with, too."""
    return max(_common(requests[at].ids, before.ids) for before in requests[:at])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def answer(model: Any, ids: list[int], cache: Any, new: int) -> list[int]:
    prompt = torch.tensor([ids])
    given = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones_like(prompt)
    out = model.generate(
        input_ids=prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **given
    )
    return list(out[0, len(ids) :].tolist())


def measure(model: Any, tokenizer: Any, session: Session, ways: Sequence[str], new: int, *, timed: bool) -> Result:
    """A row for each request but the first, which nothing is known of."""
    rows: list[Result] = [
        {
            "tokens": len(request.ids),
            "prefix": shared(session.requests, at),
            "answer": request.answer,
            "ways": {},
        }
        for at, request in enumerate(session.requests)
        if at
    ]
    for way in ways:
        policy = WAYS[way]
        cache = ChunkReuseCache(model, ChunkStore(model), policy) if policy is not None else None
        held: list[int] = []
        for at, request in enumerate(session.requests):
            if cache is None and not at:
                continue
            edits = as_edits(held, request.ids) if held else []
            start = time.process_time()
            report = None
            if edits and way.startswith("edit"):
                assert cache is not None
                cache.edit(replace=edits)
                report = cache.report
            found = answer(model, request.ids, cache, new)
            seconds = time.process_time() - start
            if cache is not None:
                held = [*request.ids, *found[:-1]]
                report = cache.report if report is None else report
            if at:
                said = tokenizer.decode(found, skip_special_tokens=True)
                row = rows[at - 1]["ways"][way] = {"said": said, "right": right(said, request.answer)}
                row |= {"s": seconds} if timed else {}
                if report is not None:
                    row["reused"] = report.reused_tokens
                    row["report"] = str(report)
    return {"kind": session.kind, "requests": rows}


def right(said: str, wanted: str) -> bool:
    return wanted.lower() in said.lower()


def measure_all(
    into: list[Result], model: Any, tokenizer: Any, session: Session, ways: Sequence[str], new: int, *, timed: bool
) -> None:
    found = measure(model, tokenizer, session, ways, new, timed=timed)
    into.append(found)
    for row in found["requests"]:
        told = {way: (each.get("s"), each["right"], each.get("reused")) for way, each in row["ways"].items()}
        print(session.kind, row["tokens"], row["prefix"], told, flush=True)


def markdown(result: Result) -> str:
    runs = result.get("provenances", [result["provenance"]])
    lines = ["; and ".join(runs), ""]
    for title, sessions in result["models"].items():
        if sessions:
            lines += [f"## {title}", "", *table(sessions, result["new"])]
    return "\n".join(lines) + "\n"


def table(sessions: list[Result], new: int) -> list[str]:
    ways = list(sessions[0]["requests"][0]["ways"])
    cached = [way for way in ways if way != "plain"]
    timed = [way for way in cached if "s" in sessions[0]["requests"][0]["ways"][way]]  # --counts has none
    requests = sum(len(each["requests"]) for each in sessions)
    lines = [
        f"{len(sessions)} sessions, {requests} requests behind the first of each; answers of {new} tokens.",
        "",
        f"| edits | tokens | in a prefix | {' | '.join(f'reused, {way}' for way in cached)} | "
        f"{' | '.join([*(f'right, {way}' for way in ways), *(f'time, {way}' for way in timed)])} |",
        f"| --- |{' ---: |' * (2 + len(cached) + len(ways) + len(timed))}",
    ]
    kinds = list(dict.fromkeys(each["kind"] for each in sessions))
    for kind in (*kinds, "all"):
        rows = [row for each in sessions if kind in (each["kind"], "all") for row in each["requests"]]
        lines.append(f"| {kind} | {' | '.join(_cells(rows, ways, cached, timed))} |")
    return [*lines, ""]


def _cells(rows: list[Result], ways: list[str], cached: list[str], timed: list[str]) -> Iterator[str]:
    tokens = sum(row["tokens"] for row in rows)
    yield f"{tokens / len(rows):,.0f}"
    yield f"{sum(row['prefix'] for row in rows) / tokens:.0%}"
    for way in cached:
        yield f"{sum(row['ways'][way]['reused'] for row in rows) / tokens:.0%}"
    for way in ways:
        yield f"{sum(row['ways'][way]['right'] for row in rows)} of {len(rows)}"
    for way in timed:
        seconds = sum(row["ways"][way]["s"] for row in rows)
        yield f"{seconds / sum(row['ways']['plain']['s'] for row in rows):.2f}" if "plain" in ways else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="of tools, notes")
    add_options(parser)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS), metavar="WAY")
    parser.add_argument("--kinds", nargs="+", choices=EDITS, default=tuple(EDITS), metavar="KIND", help="of edits")
    parser.add_argument("--sessions", type=int, default=4, help="of each kind of edit")
    parser.add_argument("--turns", type=int, default=4, help="requests of a session")
    parser.add_argument("--steps", type=int, default=8, help="results of a session before its first request")
    parser.add_argument("--notes", type=int, default=16, help="notes of a session before its first request")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--counts", action="store_true", help="write no seconds: the machine does other work")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps + options.turns - 1 > len(NOTES):
        parser.error(f"steps and turns must be {len(NOTES) + 1} at most together, got {options.steps + options.turns}")
    if unknown := set(options.parts) - {"tools", "notes"}:
        parser.error(f"parts must be of tools, notes, got {', '.join(sorted(unknown))}")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parts = options.parts or ["tools", "notes"]
    command = f"`python benchmarks/transcripts.py {' '.join(sys.argv[1:])}`".replace(" `", "`")
    result: Result = {"provenance": str(provenance(command, "cpu")), "new": options.new, "models": {}}
    record = Record("transcripts-cpu", options, result, markdown)
    for part in parts:
        model, tokenizer = load() if part == "tools" else load_embedded()
        make = tool_sessions if part == "tools" else note_sessions
        title = "Tools' outputs, SmolLM2-135M-Instruct" if part == "tools" else "Notes, the embedded reader"
        into: list[Result] = result["models"].setdefault(title, [])
        texts = options.steps if part == "tools" else options.notes
        sizes = options.sessions, options.turns, texts, options.seed
        for number, session in enumerate(make(tokenizer, options.kinds, *sizes)):
            case = f"{title}: {session.kind}, {number}"
            given = into, model, tokenizer, session, options.ways, options.new
            record.measure(case, partial(measure_all, *given, timed=not options.counts))
    record.show()


if __name__ == "__main__":
    main()
