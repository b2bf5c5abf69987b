"""A model larger than what it may take of its device, against the link that its layers come over, and accelerate.

    python benchmarks/streaming.py --out benchmarks/results [--device cuda] [--model NAME] [--layers 24] [--budget 7GB]

On a GPU: random AWQ weights with the layer shapes of a model of `what_fits.py`, Qwen2.5-32B by default, are written to
a folder and loaded within the budget. The ceiling of decoding is the bandwidth of the link, taken in the same run with
copies of one pinned layer, over the bytes that a forward copies. Decoding is 64 tokens behind a prompt of 128, the
first one left out; the time to the first token is that of a prompt of 1,000. How long the computation stood still for
copies tells whether the link bounds it, and the same model with all layers on the device how fast it could be at most.
The same is decoded with each layer in one copy, in place of pieces of 32 MB. accelerate's `cpu_offload` then runs the
same weights. A part that fails is named, and the others go on. `--shape tiny` does so with tiny layers, anywhere.

The forecast is what `benchmarks/ring.py` makes of the link, the bytes of a layer, the time of a layer with
all layers on the GPU, which is the host's where the host is slower, and the GPU's part of it. What decoding reaches
beyond or below it is not explained by these. `link.py` compares layers in one copy with
pieces, and memory that PyTorch allocates with memory that is registered, as layers are.

On a CPU there is no link. Layers go from files through two slots in host memory, computing nothing, against reading
the same files one after the other; both leave nothing in the page cache. And what a hook costs: a model of tiny layers
with and without them, on a backend that copies nothing.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import clock
import torch
from accelerate import cpu_offload
from record import Record, add_options, add_shape
from reuse import Ids, in_turn, measured_on, medians, provenance
from ring import simulate
from shapes import make_model
from targets import Result, verdicts
from transformers import PreTrainedConfig, PreTrainedModel
from what_fits import MODELS, qwen

from kvboost_hf import StreamingConfig, load_streamed, stop_streaming, stream_layers, streaming_plan, streaming_stats
from kvboost_hf.config import parse_size
from kvboost_hf.offload.backend import ThreadedBackend, use_backend
from kvboost_hf.offload.cuda import CudaBackend
from kvboost_hf.offload.disk import FileSource
from kvboost_hf.offload.plan import Ring
from kvboost_hf.offload.sources import Source
from kvboost_hf.verify.measure import timed_generate
from recipes.awq import write_random_awq

PROMPT, LONG_PROMPT, TOKENS, PEER_TOKENS = 128, 1000, 64, 8
TINY_PROMPT, TINY_TOKENS = 16, 4
ASLEEP_CYCLES = 400_000_000  # of a GPU: a fifth of a second
PARTS = ("ours", "whole layers", "resident", "cpu_offload")
TINY, TINY_BUDGET = qwen(128, 256, 6, 2, 1), {"cpu": "9MB", "cuda": "42.9MB"}
TINY.vocab_size = 1024


class NoCopies:
    """A backend under which slots hold zeros for ever."""

    device = torch.device("cpu")
    bytes_copied = synchronous_loads = 0
    stall_s = 0.0

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]

    def issue(self, slot: int, source: Source) -> None: ...

    def wait(self, slot: int) -> None: ...

    def release(self, slot: int) -> None: ...

    def copy_rate(self) -> float:
        return 0.0

    def close(self) -> None: ...


def shaped(name: str, layers: int) -> PreTrainedConfig:
    """The configuration of a model of `what_fits.py`, with so many layers."""
    whole = MODELS[name]
    sizes = whole.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    return type(whole)(**sizes)


@contextmanager
def checkpoint(config: PreTrainedConfig, folder: Path | None) -> Iterator[Path]:
    """A folder with random AWQ weights, removed afterwards."""
    config.dtype = torch.float16
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as path:
        write_random_awq(config, path, group_size=128, seed=0, max_shard_size="2GB")
        yield Path(path)


def load(path: Path, streaming: StreamingConfig, device: str) -> PreTrainedModel:
    model = load_streamed(str(path), streaming, device=device).eval()
    model.generation_config.eos_token_id = None
    return model


def tokens_per_s(model: PreTrainedModel, tokens: int, prompt: int = PROMPT) -> float:
    call = timed_generate(model, Ids(2)(prompt), tokens)
    assert len(call.ids) == tokens
    return 1000 * (tokens - 1) / (call.total_ms - call.ttft_ms)


def costs(model: PreTrainedModel, rounds: int = 5) -> tuple[float, float]:
    """Seconds that a layer takes the host to submit and the GPU to compute, for one token, with all layers there.

    The GPU sleeps until all is submitted, so that it never waits for the host.
    """
    ids, host, device = torch.zeros(1, 1, dtype=torch.long, device="cuda"), [], []
    for n in range(-2, rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(ASLEEP_CYCLES)
        begin.record()
        before = time.perf_counter()
        model(ids, use_cache=False)
        after = time.perf_counter()
        end.record()
        end.synchronize()
        if n >= 0:
            host.append(after - before)
            device.append(begin.elapsed_time(end) / 1000)
    layers = model.config.num_hidden_layers
    return statistics.median(host) / layers, statistics.median(device) / layers


def forecast(plan: Result, host_s: float, compute_s: float) -> float:
    """Tokens per second of decoding over the ceiling, by the simulation of a pass.

    Args:
        plan: `layer_bytes` of all layers, which are equal, `resident_layers`, `n_slots`, and the `link` in bytes per
            second.
        host_s: Seconds after which the next layer can begin, if it is there.
        compute_s: Seconds that the GPU takes for a layer.
    """
    count = plan["layers"]
    found = simulate(
        [plan["layer_bytes"]] * count,
        [compute_s] * count,
        plan["resident_layers"],
        n_slots=plan["n_slots"],
        link_bytes_per_s=plan["link"],
        host_s=host_s,
    )
    streamed = count - len(plan["resident_layers"])
    return streamed * plan["layer_bytes"] / plan["link"] / found.seconds


def ours(path: Path, options: argparse.Namespace, found: Result) -> None:
    """Fills `found` step by step, decoding first."""
    device, rounds, budget = options.device, options.rounds, options.budget
    clock.forget_peak(device)
    model = load(path, StreamingConfig(vram_budget=budget, max_tokens=2048), device)
    found["loaded_bytes"] = clock.peak_bytes(device)
    plan = streaming_plan(model)
    assert plan is not None, f"all layers stay within {budget}: pass a smaller --budget"
    found |= {"resident": len(plan.resident), "streamed": len(plan.in_host), "planned_bytes": plan.device_bytes}
    found |= {"resident_layers": list(plan.resident), "layers": len(plan.sizes.layer_bytes)}
    found |= {"layer_bytes": plan.slot_bytes, "n_slots": plan.n_slots}
    host = torch.empty(plan.slot_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    found["link"] = 1e9 * clock.link_rate(host, 20, device)
    found["ceiling"] = plan.tokens_per_s(found["link"])
    clock.free(device)
    clock.forget_peak(device)
    tokens_per_s(model, options.peer_tokens, options.prompt)  # compiles
    rates, before = [], streaming_stats(model)
    for _ in range(rounds):
        rates.append(tokens_per_s(model, options.tokens, options.prompt))
    after = streaming_stats(model)
    assert before is not None
    assert after is not None
    found |= {
        "tokens_per_s": statistics.median(rates),
        "misses": after.misses - before.misses,
        "bytes_per_forward": (after.bytes_copied - before.bytes_copied) / (rounds * options.tokens),
        "streamed_bytes": plan.streamed_bytes,
        "tokens": rounds * options.tokens,
        "stall_s": after.stall_s - before.stall_s,
        "copy_rate": after.copy_rate,
    }
    firsts = [timed_generate(model, Ids(3 + n)(options.long_prompt), 1).ttft_ms for n in range(rounds + 1)][1:]
    found["ttft_ms"] = statistics.median(firsts)
    found["peak_bytes"] = peak = max(found["loaded_bytes"], clock.peak_bytes(device))
    found["reserved_bytes"] = clock.peak_bytes(device, reserved=True)
    found["within"] = peak <= (parse_size(budget) or 0)


def speed_of(model: PreTrainedModel, options: argparse.Namespace) -> float:
    """Tokens per second, in the median of the rounds."""
    tokens_per_s(model, options.peer_tokens, options.prompt)  # compiles
    return statistics.median(tokens_per_s(model, options.tokens, options.prompt) for _ in range(options.rounds))


def whole_layers(path: Path, options: argparse.Namespace) -> float:
    """Tokens per second where a layer is one copy, not pieces."""
    with mock.patch.dict(CudaBackend.__init__.__kwdefaults__, piece_bytes=1 << 30):
        model = load(path, StreamingConfig(vram_budget=options.budget, max_tokens=2048), options.device)
    return speed_of(model, options)


def resident(path: Path, options: argparse.Namespace) -> Result:
    """All layers stay: what is computed, and what the host submits, without a copy."""
    model = load(path, StreamingConfig(residency_mode="full_resident"), options.device)
    host_s, compute_s = costs(model) if options.device == "cuda" else (0.0, 0.0)
    return {"tokens_per_s": speed_of(model, options), "host_s": host_s, "compute_s": compute_s}


def peer(path: Path, options: argparse.Namespace) -> Result:
    """accelerate on the same weights, which wait in host memory."""
    model = load(path, StreamingConfig(residency_mode="full_resident"), "cpu")
    cpu_offload(model, execution_device=torch.device(options.device), offload_buffers=True)
    tokens_per_s(model, 2, options.prompt)
    return {"tokens_per_s": tokens_per_s(model, options.peer_tokens, options.prompt)}


def on_gpu(options: argparse.Namespace, record: Record) -> None:
    result = record.result
    result.update(model=options.model, layers=options.layers, budget=options.budget)

    def add_ours(path: Path) -> None:
        found: Result = {}
        result["ours"] = found
        ours(path, options, found)
        result["of the ceiling"] = found["tokens_per_s"] / found["ceiling"]

    def add_whole(path: Path) -> None:
        result["whole layers"] = {"tokens_per_s": (speed := whole_layers(path, options))}
        result["pieces against whole layers"] = result["ours"]["tokens_per_s"] / speed

    def add_resident(path: Path) -> None:
        result["resident"] = found = resident(path, options)
        if "ours" in result:
            pace = 1 / found["tokens_per_s"] / result["ours"]["layers"]
            result["forecast"] = forecast(result["ours"], pace, found["compute_s"])

    def add_peer(path: Path) -> None:
        result["cpu_offload"] = found = peer(path, options)
        if "ours" in result:
            result["against cpu_offload"] = result["ours"]["tokens_per_s"] / found["tokens_per_s"]

    parts = {"ours": add_ours, "whole layers": add_whole, "resident": add_resident, "cpu_offload": add_peer}
    config = TINY if options.shape == "tiny" else shaped(options.model, options.layers)
    # On the host nothing would be streamed, were its memory not taken for that of a device.
    apart = use_backend(partial(ThreadedBackend, torch.device("cpu"))) if options.device == "cpu" else nullcontext()
    with checkpoint(config, options.folder) as path, apart:
        for name in options.only:
            record.measure(name, partial(parts[name], path))


def from_files(rounds: int, folder: Path | None) -> Result:
    """Bytes per second through slots, and of reading alone."""
    config = qwen(2048, 5632, 8, 16, 4)
    config.vocab_size = 1024
    with checkpoint(config, folder) as path, tempfile.TemporaryDirectory(dir=folder) as layers:
        model = load(path, StreamingConfig(residency_mode="full_stream", disk_folder=layers), "cpu")
        files = list(Path(layers).rglob("*.bin"))
        sources = [FileSource(open(file, "rb", buffering=0), file.stat().st_size, {}) for file in files]
        nbytes = sum(source.nbytes for source in sources)
        room = torch.empty(max(source.nbytes for source in sources), dtype=torch.uint8)

        def timed(work: Callable[[], object]) -> float:
            begin = time.perf_counter()
            work()
            return 1000 * (time.perf_counter() - begin)

        def read() -> None:
            for source in sources:
                source.read_into(room[: source.nbytes], 0)

        backend, ring = ThreadedBackend(torch.device("cpu")), Ring(len(sources), 2)
        backend.allocate(len(room), 2)

        def through_slots() -> None:
            for number in range(len(sources)):
                for missing in ring.missing(number):
                    backend.issue(ring.slot(missing), sources[missing])
                    ring.sent(missing)
                backend.wait(ring.slot(number))

        found = medians(in_turn({"slots": lambda n: timed(through_slots), "reading": lambda n: timed(read)}, rounds))
        backend.close()
        stop_streaming(model)
    rates = {name: 1000 * nbytes / ms for name, ms in found.items()}
    return {"bytes": nbytes, "ms": found, "bytes_per_s": rates}


def of_hooks(rounds: int, layers: int = 16) -> Result:
    """Microseconds that a hook adds to a layer, by the shortest forwards: a busy machine only makes them longer."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2}
    plain, hooked = (make_model("cpu", **sizes, num_key_value_heads=2) for _ in range(2))
    with use_backend(NoCopies):
        stream_layers(hooked, StreamingConfig(residency_mode="full_stream"), device="cpu")
    ids = torch.tensor([[1]])

    def forwards(model: PreTrainedModel) -> float:
        begin = time.perf_counter()
        model(ids)
        return 1e6 * (time.perf_counter() - begin) / layers

    times = in_turn({"plain": lambda n: forwards(plain), "hooked": lambda n: forwards(hooked)}, 30 * rounds)
    found = {name: min(each) for name, each in times.items()}
    return {"us_per_layer": found, "overhead_us": found["hooked"] - found["plain"]}


def on_cpu(options: argparse.Namespace, record: Record) -> None:
    record.measure("hooks", lambda: record.result.update(hooks=of_hooks(options.rounds)))
    record.measure("files", lambda: record.result.update(files=from_files(options.rounds, options.folder)))


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"]), "", "| | |", "| --- | ---: |"]
    rows: dict[str, str] = {}
    if "hooks" in result:
        rows["a hook adds to a layer"] = f"{result['hooks']['overhead_us']:.0f} µs"
    if "files" in result:
        files = result["files"]
        rows |= {
            "layers in files": gb(files["bytes"]),
            "through two slots": f"{gb(files['bytes_per_s']['slots'])}/s",
            "reading alone": f"{gb(files['bytes_per_s']['reading'])}/s",
        }
    if "ttft_ms" in result.get("ours", {}):
        found = result["ours"]
        rows = {
            "layer shapes": result["model"],
            "layers on the device / streamed": f"{found['resident']} / {found['streamed']}",
            "budget": result["budget"],
            "planned": gb(found["planned_bytes"]),
            "peak, allocated": f"{gb(found['peak_bytes'])}, {'within' if found['within'] else 'beyond'} the budget",
            "peak, while loading": gb(found["loaded_bytes"]),
            "peak, reserved": gb(found["reserved_bytes"]),
            "link": f"{gb(found['link'])}/s",
            "copies while computing": f"{gb(found['copy_rate'])}/s",
            "copied for each forward": gb(found["bytes_per_forward"]),
            "ceiling": f"{found['ceiling']:.2f} tokens/s",
            "decoding": f"{found['tokens_per_s']:.2f} tokens/s",
            "misses in decoding": str(found["misses"]),
            "stood still for copies": f"{1000 * found['stall_s'] / found['tokens']:.1f} ms for each token",
            f"first token of {LONG_PROMPT}": f"{found['ttft_ms']:.0f} ms",
        }
    if "whole layers" in result:
        rows["decoding with whole layers in one copy"] = f"{result['whole layers']['tokens_per_s']:.2f} tokens/s"
    if "resident" in result:
        found = result["resident"]
        rows["decoding with all layers on the device"] = f"{found['tokens_per_s']:.2f} tokens/s"
        rows["a layer of one token, host / GPU"] = f"{1e3 * found['host_s']:.2f} / {1e3 * found['compute_s']:.2f} ms"
    if "forecast" in result:
        rows["of the ceiling, forecast"] = f"{result['forecast']:.2f}"
    if "cpu_offload" in result:
        rows["decoding with accelerate's cpu_offload"] = f"{result['cpu_offload']['tokens_per_s']:.2f} tokens/s"
    for aim in verdicts("streaming", result):
        reached = "reached" if aim.reached else "missed"
        rows[f"{aim.target.case}, of {aim.target.base}"] = f"{aim.found:.2f}, target of {aim.target.bound} {reached}"
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5)
    add_shape(parser, "8b")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured on a GPU")
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-32B", help="whose layers it has on a GPU")
    parser.add_argument("--layers", type=int, default=24, help="of the model on a GPU: 253 MB each, of a 70B 455 MB")
    parser.add_argument("--budget", default="6.5GB", help="what it may take of the GPU")
    parser.add_argument("--folder", type=Path, help="where weights are written, and removed again")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: Result = {"provenance": provenance(sys.argv[1:], "streaming.py")}
    record = Record(f"streaming-{options.device}", options, result, markdown)
    options.prompt, options.long_prompt, options.tokens, options.peer_tokens = PROMPT, LONG_PROMPT, TOKENS, PEER_TOKENS
    if options.shape == "tiny":
        options.budget, options.prompt, options.long_prompt = TINY_BUDGET[options.device], TINY_PROMPT, 2 * TINY_PROMPT
        options.tokens = options.peer_tokens = TINY_TOKENS
    (on_gpu if options.device == "cuda" or options.shape == "tiny" else on_cpu)(options, record)
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
