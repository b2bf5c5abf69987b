"""The engine of the server over models with states: answers to eight clients in one batch, and in turns.

    python benchmarks/server_states.py --out benchmarks/results [--device cuda --shape 8b]

Each client sends two requests, one after the other: a head of 1,000 tokens that is warm, 24 tokens of its own, and an
answer of 32 tokens. Tokens a second are those of all answers, from the first submission to the last end: medians of
all rounds, in which the two arms take turns. `turns` is the same engine with its batch switched off, as models with
states were served before. Each answer is compared with that of the other arm. transformers' continuous batching is
asked for the same, and what it says is noted. Models are those of `kinds.py`.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from kinds import SIZES, kinds, make
from record import Record, add_options, add_shape
from reuse import Ids, measured_on, provenance
from server_shared import Answer
from shapes import SHAPES
from targets import Result
from transformers import GenerationConfig, PreTrainedModel

from kvboost_hf.assets import load_embedded
from kvboost_hf.server.engine.worker import ModelEngine

HEAD, OWN, NEW, CLIENTS, EACH = 1000, 24, 32, 8, 2
MODELS = ["linear and full, 3 to 1", "linear beside full, in one layer", "state only"]


def run(engine: ModelEngine, prompts: list[list[list[int]]]) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a second, and all answers, to prompts [clients][requests of each, in order]."""

    def client(own: list[list[int]]) -> list[tuple[int, ...]]:
        answers = []
        for ids in own:
            answer = Answer(engine, ids, NEW)
            answer.wait()
            answers.append(answer.ids)
        return answers

    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = [ids for answers in pool.map(client, prompts) for ids in answers]
    return NEW * len(found) / (time.perf_counter() - start), found


def said_by_continuous_batching(model: Any, prompts: list[list[int]]) -> str | None:
    """Why transformers' own continuous batching does not serve the model; None if it does."""
    settings = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def measure(model: PreTrainedModel, options: argparse.Namespace) -> Result:
    shape, fresh = SHAPES[options.shape], Ids(7)
    head = fresh(HEAD)
    engines: dict[str, ModelEngine] = {}
    for arm in ("turns", "batch"):
        store = shape.new_store(model)
        store.warm(head)
        engines[arm] = ModelEngine(model, load_embedded()[1], store=store)
    engines["turns"]._runner.batchable = False
    rates: dict[str, list[float]] = {arm: [] for arm in engines}
    compared = differing = 0
    try:
        for n in range(-1, options.rounds):
            prompts = [[head + fresh(OWN) for _ in range(EACH)] for _ in range(CLIENTS)]
            answers: dict[str, list[tuple[int, ...]]] = {}
            for arm, engine in engines.items():
                rate, answers[arm] = run(engine, prompts)
                if n >= 0:
                    rates[arm].append(rate)
            compared += len(answers["batch"])
            differing += sum(a != b for a, b in zip(answers["batch"], answers["turns"], strict=True))
    finally:
        for engine in engines.values():
            engine.close()
    refusal = said_by_continuous_batching(model, [head[:20], head[:30]])
    found = {f"{arm}_tokens_per_s": statistics.median(so_far) for arm, so_far in rates.items()}
    return {**found, "compared": compared, "differing": differing, "continuous_batching": refusal}


def markdown(result: Result) -> str:
    lines = [
        f"{CLIENTS} clients, tokens of answers per second; {result['dtype']}, models of width {result['width']}; "
        f"{measured_on(result['provenance'])}",
        "",
        "| layers | model | in turns | in one batch | ratio | answers that differ "
        "| transformers' continuous batching |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in result["rows"]:
        turns, batch = row["turns_tokens_per_s"], row["batch_tokens_per_s"]
        said = row["continuous_batching"]
        lines.append(
            f"| {row['layers']} | {row['model']} | {turns:.1f} | {batch:.1f} | {batch / turns:.2f} "
            f"| {row['differing']} of {row['compared']} | {'serves it' if said is None else f'`{said}`'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    add_shape(parser, "small")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = str(SHAPES[options.shape].dtype).removeprefix("torch.")
    result: Result = {"provenance": provenance(sys.argv[1:], "server_states.py"), "dtype": dtype, "rows": []}
    result["width"] = SIZES[options.shape].width
    record = Record(f"server-states-{options.device}", options, result, markdown)
    size = SIZES[options.shape]

    def add(layers: str, model_type: str, more: dict[str, Any]) -> None:
        model = make(model_type, more, size, options)
        result["rows"].append({"layers": layers, "model": model_type, **measure(model, options)})
        print(result["rows"][-1])

    for layers, (model_type, more) in kinds(size).items():
        if layers in MODELS:
            record.measure(layers, partial(add, layers, model_type, more))
    record.show()


if __name__ == "__main__":
    main()
