"""What it costs to name a model by its content, in memory and in files: the figures of docs/streaming.md.

python benchmarks/naming.py
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from kvboost_hf import StreamingConfig, load_streamed
from kvboost_hf.cache.identity import ModelFingerprint

T = TypeVar("T")

ROUNDS = 3


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """A result, and the seconds that it took."""
    before = time.perf_counter()
    return work(), time.perf_counter() - before


def named(model: PreTrainedModel) -> tuple[bytes | str, float]:
    """The name of a model that has none yet, and the seconds that it took."""
    return timed(lambda: ModelFingerprint().durable(model))


def measure(folder: Path) -> None:
    """Print the least of several times."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_key_value_heads=4
    )
    made = LlamaForCausalLM(config)
    gigabytes = sum(parameter.nbytes for parameter in made.parameters()) / 1e9
    made.save_pretrained(folder / "m")
    del made
    seconds: dict[str, list[float]] = {}
    names = set()
    for number in range(ROUNDS):
        streaming = StreamingConfig(residency_mode="full_stream", disk_folder=str(folder / f"layers-{number}"))
        loads: dict[str, Callable[[], PreTrainedModel]] = {
            "in memory": lambda: AutoModelForCausalLM.from_pretrained(folder / "m"),
            "in files, which are written": lambda: load_streamed(str(folder / "m"), streaming, device="cpu"),
            "in files, which are there": lambda: load_streamed(str(folder / "m"), streaming, device="cpu"),
        }
        for where, load in loads.items():
            model, loaded = timed(load)
            name, took = named(model)
            names.add(name)
            seconds.setdefault(f"{where}: loaded", []).append(loaded)
            seconds.setdefault(f"{where}: named", []).append(took)
    assert len(names) == 1, "where weights are is no part of a name"
    print(f"{gigabytes:.2f} GB of weights, {torch.get_num_threads()} thread(s)")
    for what, times in seconds.items():
        print(f"{what} in {min(times):.3f} s ({gigabytes / min(times):.2f} GB/s)")


if __name__ == "__main__":
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as where:
        measure(Path(where))
