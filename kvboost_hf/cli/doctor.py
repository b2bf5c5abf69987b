"""`kvboost-hf doctor`, `check` and `fits`: what of this machine and a model works, and what fits on a device."""

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple

import torch
import transformers
from packaging.requirements import Requirement

from kvboost_hf.attention import active_tier
from kvboost_hf.cli.arguments import next_steps, typed
from kvboost_hf.cli.loading import load_shown
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.config import StreamingConfig
from kvboost_hf.engine.load import naming
from kvboost_hf.errors import how_to_install
from kvboost_hf.kernels import missing_for_triton
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.cuda import link_rate
from kvboost_hf.offload.sizes import what_fits
from kvboost_hf.outputs import Progress

_EXTRAS = {
    "demo": "`kvboost-hf demo`, `bench` and `verify`",
    "server": "`kvboost-hf serve`",
    "valkey": "tiers on a Valkey or Redis server",
    "trl": "training with TRL",
    "ray": "Ray Serve",
}


class Checked(NamedTuple):
    """One line of the report."""

    subject: str
    found: str
    remedy: str | None = None  # what to do; None if nothing is wrong
    optional: bool = False  # whether the remedy is for something that few need


def run_doctor(options: argparse.Namespace) -> int:
    """Print the report; returns 1 if something has to be done."""
    with Progress("looking at the machine") as shown:
        found = [*_machine(), *_packages(), *_model(options, shown)]
    width = max(len(each.subject) for each in found)
    for each in found:
        mark = "ok " if each.remedy is None else "-- " if each.optional else "!! "
        sys.stdout.write(f"{mark} {each.subject:{width}}  {each.found}\n")
        if each.remedy is not None:
            sys.stdout.write(f"{'':{width + 4}}  do: {each.remedy}\n")
    wrong = [each.subject for each in found if each.remedy is not None and not each.optional]
    if wrong:
        sys.stdout.write(f"\nTo do: {', '.join(wrong)}. Then, once more: {_typed('doctor', options)}\n")
        return 1
    sys.stdout.write(f"\nAll works. Next: {_typed('demo', options)}\n")
    return 0


def _typed(command: str, options: argparse.Namespace) -> str:
    return typed(command, options) if options.model else f"kvboost-hf {command}"  # works without a model, too


def _machine() -> Iterator[Checked]:
    yield Checked("Python", sys.version.split()[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    few = f"unset OMP_NUM_THREADS, or set it to {cores}: PyTorch uses {threads} of {cores} cores"
    yield Checked("processor", f"{cores} cores, PyTorch threads: {threads}", few if 2 * threads < cores else None)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Checked("memory", _size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(number)
            yield Checked(f"GPU {number}", f"{of.name}, sm_{of.major}{of.minor}, {_size(of.total_memory)}")
    elif shutil.which("nvidia-smi"):
        build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}, which finds no GPU"
        remedy = "install a build of PyTorch that fits the driver: https://pytorch.org/get-started/locally"
        yield Checked("GPU", f"there is a driver, but PyTorch is a build {build}", remedy)
    else:
        yield Checked("GPU", "none; all runs on the CPU")


def _packages() -> Iterator[Checked]:
    yield Checked("torch", torch.__version__)
    yield Checked("transformers", transformers.__version__)
    yield from _kernels()
    requirements = [Requirement(text) for text in metadata.requires("kvboost_hf") or ()]
    for extra, use in _EXTRAS.items():
        missing = [one.name for one in requirements if _is_of(one, extra) and not _is_installed(one.name)]
        remedy = f"{how_to_install(extra)}, for {use}"
        found = f"without {', '.join(missing)}" if missing else "installed"
        yield Checked(f"extra {extra}", found, remedy if missing else None, optional=True)


def _kernels() -> Iterator[Checked]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    missing = missing_for_triton(device) if device.type == "cuda" else None
    backend = active_tier(device)
    if missing is not None:
        yield Checked("triton", f"lacks {missing.what}: PyTorch's operations run", missing.remedy, optional=True)
    slow = missing is None and backend in ("sdpa", "reference")
    remedy = f"{how_to_install('cuda')}, which has kernels for sm_70 and sm_75"
    yield Checked("kvboost_fa2", f"runs as {backend!r}", remedy if slow else None, optional=True)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _is_of(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return name.replace("-", "_") == "kvboost_hf"
    return True


def _model(options: argparse.Namespace, shown: Progress) -> Iterator[Checked]:
    try:
        model, tokenizer, name = load_shown(options, shown)
    except (ValueError, OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        named = why if str(options.model) in why else f"{options.model} does not load: {why}"
        yield Checked("model", named, "pass a hub name or a folder that loads")
        return
    shown.show(f"running {name} on a few tokens")
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    yield Checked("model", f"{name}: {type(model).__name__}, {model.dtype}, {_size(size)} of weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all that they say is in the report
        found = check_model_compatibility(model, strict=False)
    for subject, reason, remedy, optional in (
        ("exact reuse", found.reason, "call its own generate(), or take another model", False),
        ("moved K/V", found.moved_reason, "leave mode='blend' out: exact reuse works without", True),
        ("streaming", found.streaming_reason, "keep all of it on the device", True),
    ):
        yield Checked(subject, "yes" if reason is None else f"no: {reason}", reason and remedy, optional)
    told = "yes" if tokenizer.chat_template else "none"
    remedy = "use /v1/completions and plain texts, or an instruct model for chats"
    yield Checked("chat template", told, None if tokenizer.chat_template else remedy, optional=True)


def run_check(options: argparse.Namespace) -> int:
    """Print the report; returns 1 if exact reuse is not possible."""
    with Progress() as shown:
        model, _, name = load_shown(options, shown)
        shown.show(f"running {name} on a few tokens")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all that they say is in the report
            found = check_model_compatibility(model, strict=False)
    sys.stdout.write(f"{name}: {found}\n")
    if not found.exact:
        again = ("kvboost-hf check --model NAME", "another model: this one runs without reuse")
        sys.stdout.write(next_steps(options, again))
        return 1
    sys.stdout.write(next_steps(options, "demo", "verify"))
    return 0


def run_fits(options: argparse.Namespace) -> int:
    """Print the plan."""
    from transformers import AutoConfig

    with naming(options.model):
        config = AutoConfig.from_pretrained(options.model)
    device = "cuda" if options.on == "gpu" else "cpu"
    streaming = StreamingConfig(
        max_tokens=options.max_tokens, prefill_chunk_size=options.prefill_chunk_size, disk_folder=options.disk_folder
    )
    with Progress(f"planning {options.model}"):
        plan = what_fits(config, options.vram_budget, streaming=streaming, bits=options.bits, device=device)
        if options.on == "gpu" and torch.cuda.is_available():
            plan = replace(plan, copy_rate=link_rate(torch.device("cuda")))
    sys.stdout.write(f"{plan}\n")
    if (other := _other_weights(config, options.bits)) is not None:
        sys.stdout.write(f"\nThis is a plan for other weights than {options.model} has: {other}.\n")
        return 0
    folder = [] if options.disk_folder is None else ["--disk-folder", options.disk_folder]
    serve = typed("serve", options, "--awq-streaming", "--vram-budget", options.vram_budget, *folder)
    sys.stdout.write(next_steps(options, (serve, "serve it within this budget")))
    return 0


def _other_weights(config: Any, bits: int | None) -> str | None:
    """Why a checkpoint cannot be served as it was planned with so many bits, and what to do; None if it can."""
    stored = getattr(config, "quantization_config", None)
    if bits is None or (stored is None and bits == 16):
        return None
    if stored is None:
        return "its own are not quantized. Name a checkpoint of it in 4 bits, or leave out `--bits`"
    try:
        PackedFormat.of(stored)
    except ValueError as error:
        return str(error).rstrip(".")
    return None if bits == 4 else "its own have 4 bits. Leave out `--bits`, or name a checkpoint that is not quantized"
