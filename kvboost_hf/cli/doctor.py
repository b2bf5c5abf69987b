"""`kvboost-hf doctor`: reports which parts of the machine, packages and a model work, and how to mend the others."""

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch
import transformers
from packaging.requirements import Requirement

from kvboost_hf.attention import active_tier
from kvboost_hf.cli.arguments import Commands
from kvboost_hf.cli.models import add_model, load_shown
from kvboost_hf.cli.next_steps import typed
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.progress import Progress
from kvboost_hf.triton_support import missing_for_triton

_EXTRAS = {
    "demo": "`kvboost-hf demo`, `bench` and `verify`",
    "server": "`kvboost-hf serve`",
    "valkey": "tiers on a Valkey or Redis server",
    "trl": "training with TRL",
    "ray": "Ray Serve",
}


class Finding(NamedTuple):
    """One line of the report."""

    subject: str
    found: str
    remedy: str | None = None  # what to do; None if nothing is wrong
    optional: bool = False  # whether the remedy is for something that few need


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="say what of this machine and a model works, and what to do")
    add_model(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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


def _machine() -> Iterator[Finding]:
    yield Finding("Python", sys.version.split()[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    few = f"unset OMP_NUM_THREADS, or set it to {cores}: PyTorch uses {threads} of {cores} cores"
    yield Finding("processor", f"{cores} cores, PyTorch threads: {threads}", few if 2 * threads < cores else None)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Finding("memory", _size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(number)
            yield Finding(f"GPU {number}", f"{of.name}, sm_{of.major}{of.minor}, {_size(of.total_memory)}")
    elif shutil.which("nvidia-smi"):
        build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}, which finds no GPU"
        remedy = "install a build of PyTorch that fits the driver: https://pytorch.org/get-started/locally"
        yield Finding("GPU", f"there is a driver, but PyTorch is a build {build}", remedy)
    else:
        yield Finding("GPU", "none; all runs on the CPU")


def _packages() -> Iterator[Finding]:
    yield Finding("torch", torch.__version__)
    yield Finding("transformers", transformers.__version__)
    yield from _kernels()
    requirements = [Requirement(text) for text in metadata.requires("kvboost_hf") or ()]
    for extra, use in _EXTRAS.items():
        missing = [one.name for one in requirements if _is_of(one, extra) and not _is_installed(one.name)]
        remedy = f"pip install 'kvboost_hf[{extra}]', for {use}"
        found = f"without {', '.join(missing)}" if missing else "installed"
        yield Finding(f"extra {extra}", found, remedy if missing else None, optional=True)


def _kernels() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    missing = missing_for_triton(device) if device.type == "cuda" else None
    backend = active_tier(device)
    if missing is not None:
        yield Finding("triton", f"lacks {missing.what}: PyTorch's operations run", missing.remedy, optional=True)
    slow = missing is None and backend in ("sdpa", "reference")
    remedy = "`pip install 'kvboost_hf[cuda]'`, which has kernels for sm_70 and sm_75"
    yield Finding("kvboost_fa2", f"runs as {backend!r}", remedy if slow else None, optional=True)


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


def _model(options: argparse.Namespace, shown: Progress) -> Iterator[Finding]:
    try:
        model, tokenizer, name = load_shown(options, shown)
    except (ValueError, OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        named = why if str(options.model) in why else f"{options.model} does not load: {why}"
        yield Finding("model", named, "pass a hub name or a folder that loads")
        return
    shown.show(f"running {name} on a few tokens")
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    yield Finding("model", f"{name}: {type(model).__name__}, {model.dtype}, {_size(size)} of weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all that they say is in the report
        found = check_model_compatibility(model, strict=False)
    for subject, reason, remedy, optional in (
        ("exact reuse", found.reason, "call its own generate(), or take another model", False),
        ("moved K/V", found.moved_reason, "leave mode='blend' out: exact reuse works without", True),
        ("streaming", found.streaming_reason, "keep all of it on the device", True),
    ):
        yield Finding(subject, "yes" if reason is None else f"no: {reason}", reason and remedy, optional)
    told = "yes" if tokenizer.chat_template else "none"
    remedy = "use /v1/completions and plain texts, or an instruct model for chats"
    yield Finding("chat template", told, None if tokenizer.chat_template else remedy, optional=True)
