"""`python -m tests.fuzz.jobs`: jobs for engines of a server, all drawn at random, for some seconds.

What is drawn: settings, a model, prompts that begin alike, clients that leave, sessions that are dropped, restarts,
and a second engine on the same folder. A greedy answer must be one that the model alone could have given, and K/V that
is left in the store must be that of its text. The status is 1 if something was wrong.
"""

import argparse
import copy
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers

from kvboost_hf import ChunkStore, DraftTreeConfig, ReusePolicy, lookup_assistant
from tests.fuzz.families import FAMILIES, MOVABLE, SAME, Family, draft, family
from tests.fuzz.history import TEXTS
from tests.heads import KINDS as HEADS
from tests.heads import make_pair
from tests.internals.server import Job, Keep, ModelEngine, Progress, SamplingOptions
from tests.server.test_worker import Told, numbers

_LONGEST = 150  # tokens of a prompt
_BLEND = {"mode": "blend", "repair": "query", "recompute_ratio": 1.0, "min_prefill_saving": 0}
_POLICIES: tuple[dict[str, Any], ...] = (
    {"min_prefill_saving": 0},
    {"min_prefill_saving": 0},
    {},
    {"reproducible": True},
    {"keep_logprobs": True},
    {"keep_hidden_states": -1},
    {"keep_hidden_states": True},
    {"audit_rate": 1.0},
)
_TREES = DraftTreeConfig(policy="tree", max_nodes=12)  # whatever passes take
# Of greedy jobs, whose answers are compared, and of others, which only run beside them.
_OPTIONS: tuple[dict[str, Any], ...] = (
    *[{}] * 3,
    {"logprobs": 2},
    {"prompt_logprobs": True, "logprobs": 1},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 0},
)


@dataclass(slots=True)
class Engines:
    """Engines of one model, and what they are made with.

    Args:
        name: The family of the model.
        policy: Fields of `ReusePolicy`.
        drafts: `"lookup"`; `"draft"`, by another model or by heads of the model itself; or None.
        limits: Further arguments of `ModelEngine`.
        store: Arguments of `ChunkStore`.
        running: All that were made and not closed; the last one is asked.
    """

    name: str
    policy: dict[str, Any]
    drafts: str | None
    limits: dict[str, Any]
    store: dict[str, Any]
    running: list[ModelEngine] = field(default_factory=list, repr=False)

    @property
    def family(self) -> Family:
        return with_heads(self.name)[0] if self.name in HEADS else family(self.name)

    def start(self, store: ChunkStore | None = None) -> ModelEngine:
        """Another engine, over a store or over a new one."""
        model = self.family.served
        told = dict(self.limits)
        if self.drafts == "lookup":
            told["draft"] = lookup_assistant(model)
        elif self.drafts is not None:
            heads = self.name in HEADS
            told["draft"] = with_heads(self.name)[1] if heads else draft(self.name, torch.float32, "trees")
        store = store if store is not None else ChunkStore(model, **self.store)
        self.running.append(ModelEngine(model, numbers(), store=store, policy=ReusePolicy(**self.policy), **told))
        return self.running[-1]

    def restart(self, draw: random.Random) -> None:
        """Go on with the same store, with a new one on its folder, or beside the engine that runs."""
        how = draw.choice(["same", "new", "beside"]) if "tiers" in self.store else "same"
        last = self.running[-1]
        if how != "beside":
            self.running.pop().close()
        if how == "new":
            last.close_store()
        self.start(last.store if how == "same" else None)

    def close(self) -> None:
        for engine in self.running:
            engine.close()
        for engine in self.running:
            engine.close_store()


@cache
def with_heads(kind: str) -> tuple[Family, Any]:
    """A model with heads of its own, and these."""
    with tempfile.TemporaryDirectory() as folder:
        target, heads = make_pair(kind, Path(folder))
    return Family(target, copy.deepcopy(target), SAME[torch.float32], steady=True), heads


def draw_engines(draw: random.Random, folder: str) -> Engines:
    """Settings, of engines that are not started."""
    name = draw.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    if draw.random() < 0.2:
        name = draw.choice(list(HEADS))
    policy = draw.choice(_POLICIES)
    if name in MOVABLE and draw.random() < 0.2:
        policy = _BLEND | {"progressive": draw.choice([True, "ride", 1, 7, 64, False])}
    limits: dict[str, Any] = {
        "max_batch_size": draw.choice([1, 2, 3, 4, 8]),
        "prefill_chunk_size": draw.choice([5, 7, 16, 17, 23, 64, 256]),
    }
    for key, values in {
        "max_live_tokens": (200, 300, 400),
        "batch_window_ms": (1, 5),
        "draft_trees": (_TREES,),
    }.items():
        if draw.random() < 0.3:
            limits[key] = draw.choice(values)
    store: dict[str, Any] = {"chunk_size": draw.choice([16, 16, 16, 32])}
    if draw.random() < 0.4:
        store["max_bytes"] = draw.choice([70_000, 150_000, 400_000])
    if draw.random() < 0.35:
        store["tiers"] = [f"disk:{folder}"]
    drafts = draw.choice([None, "lookup", "draft"])
    if drafts is None:
        limits.pop("draft_trees", None)
    return Engines(name, policy, drafts, limits, store)


def draw_jobs(draw: random.Random, lengths: list[int], said: list[list[int]]) -> Iterator[Job]:
    """Jobs whose prompts begin as others do, go on from answers, or part from them."""
    for _ in range(draw.choice([1, 2, 3, 5, 8])):
        ids = TEXTS[draw.choice([0, 0, 0, 1, 2])][0].tolist()[: draw.choice(lengths)]
        if draw.random() < 0.4:
            ids += TEXTS[draw.choice([1, 2])][0].tolist()[-draw.choice(lengths) :]
        if said and draw.random() < 0.3:
            ids = draw.choice(said) + ids[: draw.choice([1, 2, 5, 17])]
        options = SamplingOptions(max_tokens=draw.choice([0, 1, 1, 2, 5, 12, 30]), **draw.choice(_OPTIONS))
        yield Job(
            ids=ids[:_LONGEST],
            options=options,
            ends=frozenset(range(2, draw.choice([2, 2, 30]))),
            salt=draw.choice([b"", b"", b"a"]),
            client=draw.choice([b"", b"x"]),
            priority=draw.choice([0, 0, 1, -1]),
            session=draw.choice([None, None, "s"]),
            reuse=draw.choice([None, None, None, "exact"]),
            prediction=TEXTS[0][0].tolist()[:40] if draw.random() < 0.1 else (),
            keep=(Keep(tokens=draw.choice([None, 5, 20]), share=0.5),) if draw.random() < 0.1 else (),
        )


@torch.no_grad()
def wrong_with(job: Job, told: Told, of: Family, *, left: bool) -> str | None:
    """What is wrong with an answer, if anything; its client may have `left`."""
    end, options = told.end, job.options
    if end.error is not None:
        return f"it failed: {end.error!r}"
    if end.reason == "cancelled":
        return None if left else "it was cancelled"
    if options.temperature or options.repetition_penalty != 1:
        return None
    if not end.ids:
        return "it has no tokens" if options.max_tokens else None
    given = torch.tensor([[*job.ids, *end.ids]])
    logits = of.plain(given).logits[0, len(job.ids) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(end.ids)[:, None])[:, 0]
    off = float(((logits.amax(-1) - chosen) / logits.std(-1)).max())
    if off > of.same:  # or they score alike
        return f"a token is {off:.2g} standard deviations below the likeliest one"
    if options.max_tokens > len(end.ids) and end.ids[-1] not in job.ends:
        return f"it ends after {len(end.ids)} tokens by {end.reason}"
    shown = [one.logprob for event in told.events if isinstance(event, Progress) for one in event.logprobs]
    if options.logprobs is not None and not options.prompt_logprobs:
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(end.ids)[:, None])[: len(shown), 0]
        if not torch.allclose(torch.tensor(shown), wanted, atol=10 * of.same + 1e-3):
            return f"its log-probabilities are {shown}, not {wanted.tolist()}"
    return None


def ask(engines: Engines, draw: random.Random, lengths: list[int], said: list[list[int]]) -> tuple[int, list[str]]:
    """Have jobs run at the same time, and look at their answers; returns how many, and what is wrong."""
    engine = engines.running[-1]
    asked: list[tuple[Job, Told, bool]] = []
    for job in list(draw_jobs(draw, lengths, said)):
        leaves = draw.choice([None] * 6 + [1, 2, 3])
        told, ticket = Told(), list[Any]()

        def heard(_: Any, told: Told = told, ticket: list[Any] = ticket, leaves: int | None = leaves) -> None:
            if ticket and len(told.events) == leaves:
                ticket[0].cancel()

        told._at = heard
        ticket.append(engine.submit(job, told))
        asked.append((job, told, leaves is not None))
        if len(engines.running) > 1 and draw.random() < 0.3:
            asked.append((job, Told(), False))
            engines.running[-2].submit(job, asked[-1][1])
        if draw.random() < 0.04:
            engine.store.clear()
        if draw.random() < 0.06:
            engine.drop_session(job.client, "s", job.salt)
        if draw.random() < 0.15:
            time.sleep(draw.uniform(0, 0.02))
    wrong = []
    for job, told, left in asked:
        if (found := wrong_with(job, told, engines.family, left=left)) is not None:
            wrong.append(f"{found}: {job}")
        elif told.end.ids and draw.random() < 0.5:
            said.append([*job.ids, *told.end.ids])
    return len(asked), wrong


@contextmanager
def started(draw: random.Random) -> Iterator[Engines]:
    """Engines that are closed, and whose folder is removed, at the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engines = draw_engines(draw, str(Path(folder, "kept")))
        stack.callback(engines.close)
        engines.start()
        yield engines


def play(seed: int) -> tuple[Engines, int, list[str]]:
    """The engines of a seed, how many jobs they had, and what is wrong."""
    draw = random.Random(seed)
    jobs, wrong, said = 0, list[str](), list[list[int]]()
    with started(draw) as engines:
        chunk = engines.store["chunk_size"]
        edges = [1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 40, 61, draw.randrange(1, 70)]
        lengths = draw.choices(edges, k=4)
        for number in range(draw.choice([1, 2, 3, 4])):
            if number and draw.random() < 0.3:
                engines.restart(draw)
            asked, found = ask(engines, draw, lengths, said)
            jobs, wrong = jobs + asked, wrong + found
        for engine in engines.running:
            engine.close()
            if engine.stats()["batch_bytes"]:
                wrong.append(f"{engine.stats()['batch_bytes']} bytes of a batch are left")
            engine.store.check_consistency()
            if (integrity := engine.store.check_integrity()).wrong:
                wrong.append(f"K/V in the store: {integrity}")
    return engines, jobs, wrong


def main() -> int:
    """Play, and say what was wrong."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.jobs", description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)g)")
    options.add_argument("--seed", type=int, default=None, help="of the first engines; without it, one by chance")
    given = options.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    first = given.seed if given.seed is not None else random.SystemRandom().randrange(10**9)
    begun, jobs, failed = time.monotonic(), 0, 0
    for seed in count(first):
        if time.monotonic() - begun > given.seconds:
            break
        engines, asked, wrong = play(seed)
        jobs, failed = jobs + asked, failed + bool(wrong)
        if wrong:
            _say(f"--seed {seed}, {engines}:\n" + "\n".join(wrong))
    _say(f"python -m tests.fuzz.jobs --seed {first}: {seed - first} engines, {jobs} jobs; {failed or 'nothing'} wrong")
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
