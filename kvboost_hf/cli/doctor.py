"""`kvboost-hf doctor` says what of this machine and a model works.

Each line is printed as it is found. What needs torch, which takes seconds to import, and the model come last.
"""

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement

from kvboost_hf.cli.arguments import typed
from kvboost_hf.errors import how_to_install
from kvboost_hf.outputs import Progress

_WIDTH = 18  # characters of a subject
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
    wrong: list[str] = []
    with Progress("looking at the machine") as shown:
        for each in (*_machine(), *_packages()):
            _print(each, shown, wrong)
        shown.show("importing torch and transformers")
        for each in (*_torch(), *_model(options, shown)):
            _print(each, shown, wrong)
    if wrong:
        sys.stdout.write(f"\nTo do: {', '.join(wrong)}. Then, once more: {_typed('doctor', options)}\n")
        return 1
    sys.stdout.write(f"\nAll works. Next: {_typed('demo', options)}\n")
    return 0


def _print(each: Checked, shown: Progress, wrong: list[str]) -> None:
    mark = "ok " if each.remedy is None else "-- " if each.optional else "!! "
    with shown.aside():
        sys.stdout.write(f"{mark} {each.subject:{_WIDTH}}  {each.found}\n")
        if each.remedy is not None:
            sys.stdout.write(f"{'':{_WIDTH + 4}}  do: {each.remedy}\n")
        sys.stdout.flush()
    if each.remedy is not None and not each.optional:
        wrong.append(each.subject)


def _typed(command: str, options: argparse.Namespace) -> str:
    return typed(command, options) if options.model else f"kvboost-hf {command}"  # works without a model, too


def _machine() -> Iterator[Checked]:
    yield Checked("Python", sys.version.split()[0])
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Checked("memory", _size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def _packages() -> Iterator[Checked]:
    for name in ("torch", "transformers"):
        yield Checked(name, metadata.version(name))
    requirements = [Requirement(text) for text in metadata.requires("kvboost_hf") or ()]
    for extra, use in _EXTRAS.items():
        missing = [one.name for one in requirements if _is_of(one, extra) and not _is_installed(one.name)]
        remedy = f"{how_to_install(extra)}, for {use}"
        found = f"without {', '.join(missing)}" if missing else "installed"
        yield Checked(f"extra {extra}", found, remedy if missing else None, optional=True)


def _torch() -> Iterator[Checked]:
    import torch

    from kvboost_hf.attention import active_tier
    from kvboost_hf.kernels import missing_for_triton

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    few = f"unset OMP_NUM_THREADS, or set it to {cores}: PyTorch uses {threads} of {cores} cores"
    yield Checked("processor", f"{cores} cores, PyTorch threads: {threads}", few if 2 * threads < cores else None)
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
    from kvboost_hf.cli.loading import load_shown, set_device
    from kvboost_hf.compatibility import check_model_compatibility

    try:
        set_device(options)
    except ValueError as error:
        return (yield Checked("device", str(error), "leave `--device` out, or name another one"))
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
