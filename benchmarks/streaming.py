"""A model larger than what it may take of its device, against the link that its layers come over, and accelerate.

    python benchmarks/streaming.py --out benchmarks/results [--device cuda] [--model NAME] [--layers 24] [--budget 7GB]

On a GPU: random AWQ weights with the layer shapes of a model of `what_fits.py`, Qwen2.5-32B by default, are written to
a folder and loaded within the budget. The ceiling of decoding is the bandwidth of the link, taken in the same run with
copies of one pinned layer, over the bytes that a forward copies. Decoding is 64 tokens behind a prompt of 128, the
first one left out; the time to the first token is that of a prompt of 1,000. How long the computation stood still for
copies tells whether the link bounds it, and the same model with all layers on the device how fast it could be at most.
accelerate's `cpu_offload` then runs the same weights. A part that fails is named, and the others go on.

The forecast is what `kvboost_hf/offload/simulate.py` makes of the link, the bytes of a layer, the time of a layer with
all layers on the GPU, which is the host's where the host is slower, and the GPU's part of it. What decoding reaches
beyond or below it is not explained by these. "Copies" compares a layer in one piece with the pieces that the backend
makes of it (`--piece-mb`), from memory that PyTorch allocates and from memory that is registered, as layers are.

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
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from accelerate import cpu_offload
from record import Record, add_options
from reuse import Ids, in_turn, measured_on, medians, provenance
from shapes import make_model
from targets import STREAMING, Result
from transformers import PreTrainedConfig, PreTrainedModel
from what_fits import MODELS, qwen

from kvboost_hf import StreamingConfig, load_streamed, stop_streaming, stream_layers, streaming_plan, streaming_stats
from kvboost_hf.config import parse_size
from kvboost_hf.demo.timing import timed_generate
from kvboost_hf.offload.backends import cuda
from kvboost_hf.offload.backends.choice import use_backend
from kvboost_hf.offload.backends.runtime import CudaRuntime
from kvboost_hf.offload.backends.threaded import ThreadedBackend
from kvboost_hf.offload.disk import FileSource
from kvboost_hf.offload.host import HostMemory, cuda_pinning
from kvboost_hf.offload.schedule import Ring
from kvboost_hf.offload.simulate import simulate
from kvboost_hf.offload.sources import Source
from recipes.awq import write_random_awq

PROMPT, LONG_PROMPT, TOKENS, PEER_TOKENS = 128, 1000, 64, 8
WHOLE_BYTES = 1 << 30  # more than a layer
ASLEEP_CYCLES = 400_000_000  # of a GPU: a fifth of a second


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


def tokens_per_s(model: PreTrainedModel, tokens: int) -> float:
    call = timed_generate(model, Ids(2)(PROMPT), tokens)
    assert len(call.ids) == tokens
    return 1000 * (tokens - 1) / (call.total_ms - call.ttft_ms)


def link(nbytes: int, piece_bytes: int | None = None, *, registered: bool = False, rounds: int = 20) -> float:
    """Bytes per second of copies from pinned memory, each as large as a layer.

    Args:
        nbytes: Of a layer.
        piece_bytes: The most bytes of one copy; None for all of them.
        registered: Whether memory is pinned as that of layers is, and not by PyTorch.
        rounds: Copies that are timed.
    """
    device = torch.device("cuda")
    if registered:
        host = HostMemory(cuda_pinning(device)).allocate(nbytes, must_pin=True)
    else:
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    runtime, times = CudaRuntime(device), []
    there, stream = torch.empty(nbytes, dtype=torch.uint8, device=device), runtime.current_stream()
    for n in range(-3, rounds):
        begin = runtime.record(stream, timed=True)
        runtime.copy(there, host, stream, piece_bytes or nbytes)
        end = runtime.record(stream, timed=True)
        end.synchronize()
        if n >= 0:
            times.append(begin.elapsed_time(end))
    return 1000 * nbytes / statistics.median(times)


def copies(nbytes: int) -> dict[str, float]:
    """Bytes per second by way."""
    ways = {"whole, allocated": (None, False), "pieces, allocated": (cuda.PIECE_BYTES, False)}
    ways |= {"whole, registered": (None, True), "pieces, registered": (cuda.PIECE_BYTES, True)}
    return {way: link(nbytes, piece, registered=registered) for way, (piece, registered) in ways.items()}


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


def ours(path: Path, budget: str, rounds: int) -> Result:
    torch.cuda.reset_peak_memory_stats()
    model = load(path, StreamingConfig(vram_budget=budget, max_tokens=2048), "cuda")
    loaded = torch.cuda.max_memory_allocated()
    plan = streaming_plan(model)
    assert plan is not None, f"all layers stay within {budget}: pass a smaller --budget"
    tokens_per_s(model, PEER_TOKENS)  # compiles
    rates, before = [], streaming_stats(model)
    for _ in range(rounds):
        rates.append(tokens_per_s(model, TOKENS))
    after = streaming_stats(model)
    firsts = [timed_generate(model, Ids(3 + n)(LONG_PROMPT), 1).ttft_ms for n in range(rounds + 1)][1:]
    assert before is not None
    assert after is not None
    return {
        "resident": len(plan.resident),
        "resident_layers": list(plan.resident),
        "layers": len(plan.sizes.layer_bytes),
        "layer_bytes": plan.slot_bytes,
        "n_slots": plan.n_slots,
        "piece_bytes": cuda.PIECE_BYTES,
        "streamed": len(plan.in_host),
        "planned_bytes": plan.device_bytes,
        "peak_bytes": (peak := torch.cuda.max_memory_allocated()),
        "loaded_bytes": loaded,
        "within": peak <= (parse_size(budget) or 0),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "link": (rate := link(plan.slot_bytes)),
        "ceiling": plan.tokens_per_s(rate),
        "tokens_per_s": statistics.median(rates),
        "misses": after.misses - before.misses,
        "bytes_per_forward": (after.bytes_copied - before.bytes_copied) / (rounds * TOKENS),
        "streamed_bytes": plan.streamed_bytes,
        "tokens": rounds * TOKENS,
        "stall_s": after.stall_s - before.stall_s,
        "copy_rate": after.copy_rate,
        "ttft_ms": statistics.median(firsts),
    }


def resident(path: Path, rounds: int) -> Result:
    """All layers stay: what is computed, and what the host submits, without a copy."""
    model = load(path, StreamingConfig(residency_mode="full_resident"), "cuda")
    tokens_per_s(model, PEER_TOKENS)
    rate = statistics.median(tokens_per_s(model, TOKENS) for _ in range(rounds))
    host_s, compute_s = costs(model)
    return {"tokens_per_s": rate, "host_s": host_s, "compute_s": compute_s}


def peer(path: Path) -> Result:
    """accelerate on the same weights, which wait in host memory."""
    model = load(path, StreamingConfig(residency_mode="full_resident"), "cpu")
    cpu_offload(model, execution_device=torch.device("cuda"), offload_buffers=True)
    tokens_per_s(model, 2)
    return {"tokens_per_s": tokens_per_s(model, PEER_TOKENS)}


def on_gpu(options: argparse.Namespace, record: Record) -> None:
    result = record.result
    result.update(model=options.model, layers=options.layers, budget=options.budget)
    if options.piece_mb is not None:
        cuda.PIECE_BYTES = options.piece_mb << 20 if options.piece_mb else WHOLE_BYTES

    def add_ours(path: Path) -> None:
        result["ours"] = found = ours(path, options.budget, options.rounds)
        result["of the ceiling"] = found["tokens_per_s"] / found["ceiling"]

    def add_resident(path: Path) -> None:
        result["resident"] = found = resident(path, options.rounds)
        if "ours" in result:
            pace = 1 / found["tokens_per_s"] / options.layers
            result["forecast"] = forecast(result["ours"], pace, found["compute_s"])

    def add_copies(path: Path) -> None:
        if "ours" in result:
            result["copies"] = copies(result["ours"]["layer_bytes"])

    def add_peer(path: Path) -> None:
        result["cpu_offload"] = found = peer(path)
        if "ours" in result:
            result["against cpu_offload"] = result["ours"]["tokens_per_s"] / found["tokens_per_s"]

    parts = {"ours": add_ours, "copies": add_copies, "resident": add_resident, "cpu_offload": add_peer}
    with checkpoint(shaped(options.model, options.layers), options.folder) as path:
        for name, add in parts.items():
            record.measure(name, partial(add, path))


def from_files(rounds: int, folder: Path | None) -> Result:
    """Bytes per second through slots, and of reading alone."""
    config = qwen(2048, 5632, 8, 16, 4)
    config.vocab_size = 1024
    with checkpoint(config, folder) as path, tempfile.TemporaryDirectory(dir=folder) as layers:
        model = load(path, StreamingConfig(residency_mode="full_stream", disk_folder=layers), "cpu")
        files = [(file, file.stat()) for file in Path(layers).rglob("*.bin")]
        sources = [FileSource(file, found.st_size, found.st_mtime_ns) for file, found in files]
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
    if "ours" in result:
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
            "copied for each forward": gb(found["bytes_per_forward"]),
            "ceiling": f"{found['ceiling']:.2f} tokens/s",
            "decoding": f"{found['tokens_per_s']:.2f} tokens/s",
            "misses in decoding": str(found["misses"]),
            "stood still for copies": f"{1000 * found['stall_s'] / found['tokens']:.1f} ms for each token",
            f"first token of {LONG_PROMPT}": f"{found['ttft_ms']:.0f} ms",
        }
    for way, rate in result.get("copies", {}).items():
        rows[f"copies of a layer, {way}"] = f"{gb(rate)}/s"
    if "resident" in result:
        found = result["resident"]
        rows["decoding with all layers on the device"] = f"{found['tokens_per_s']:.2f} tokens/s"
        rows["a layer of one token, host / GPU"] = f"{1e3 * found['host_s']:.2f} / {1e3 * found['compute_s']:.2f} ms"
    if "forecast" in result:
        rows["of the ceiling, forecast"] = f"{result['forecast']:.2f}"
    if "cpu_offload" in result:
        rows["decoding with accelerate's cpu_offload"] = f"{result['cpu_offload']['tokens_per_s']:.2f} tokens/s"
    for name, least in STREAMING.items():
        if name in result:
            reached = "reached" if result[name] >= least else "missed"
            rows[name] = f"{result[name]:.2f}, target of {least} {reached}"
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5)
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-32B", help="whose layers it has on a GPU")
    parser.add_argument("--layers", type=int, default=24, help="of the model on a GPU: 253 MB each, of a 70B 455 MB")
    parser.add_argument("--budget", default="6.5GB", help="what it may take of the GPU")
    parser.add_argument("--piece-mb", type=int, help="MiB of one copy; 0 for whole layers, else as the backend has it")
    parser.add_argument("--folder", type=Path, help="where weights are written, and removed again")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: Result = {"provenance": provenance(sys.argv[1:], "streaming.py")}
    record = Record(f"streaming-{options.device}", options, result, markdown)
    (on_gpu if options.device == "cuda" else on_cpu)(options, record)
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
