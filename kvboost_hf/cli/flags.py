"""The flags of each command of `kvboost-hf`, as fields of dataclasses.

Nothing here imports torch, so that help and errors of arguments come at once.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvboost_hf.choices import (
    BENCH_ARMS,
    CHOSEN_BENCH_ARMS,
    CHOSEN_PEERS,
    CHOSEN_VERIFY_ARMS,
    PEERS,
    REAL_WORKLOADS,
    WORKLOADS,
)
from kvboost_hf.cli.arguments import ModelFlags, positive
from kvboost_hf.cli.arguments import figure as figure_file
from kvboost_hf.cli.config_file import ConfigFlag
from kvboost_hf.cli.server_flags import AlikeFlags, add_options, add_streaming
from kvboost_hf.config import PLANNED, KVQuantConfig, StreamingConfig
from kvboost_hf.engine.settings import ALIKE, EngineSettings
from kvboost_hf.fields import add_flags, setting
from kvboost_hf.outputs import output_path
from kvboost_hf.server.settings import KEYS, ServerSettings

_ASKED = tuple(dict.fromkeys((*WORKLOADS, *REAL_WORKLOADS)))


def _sizes(text: str) -> tuple[int, int]:
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and width.isdecimal()):
        raise ValueError(f"must be layers x width, such as 8x512, got {text}")
    return int(layers), int(width)


def _live(text: str) -> KVQuantConfig:
    from kvboost_hf.cache.codecs import live_config

    config = live_config(text)
    if config is None:
        raise ValueError(f"must be bits from 1 to 4 or a lossy codec, got {text}")
    return config


@dataclass
class DemoFlags:
    """Flags of `demo`.

    Args:
        prompts: Measure these in place of all else: a prompt on each line, or a JSON list of texts and of lists of
            messages.
        repeats: Repetitions to take medians over; None is 1 for a model that is named, else 3.
        max_new_tokens: Length of an answer.
        seed: The seed of the texts.
        figure: Draw the times to the first token.
    """

    prompts: Path | None = setting(None, metavar="FILE")
    repeats: int | None = setting(None, parse=positive)
    max_new_tokens: int = setting(24, parse=positive)
    seed: int = 0
    figure: Path | None = setting(None, metavar="PNG", parse=figure_file)


@dataclass
class BenchFlags:
    """Flags of `bench`.

    Args:
        random: A random model of L layers, W wide, such as 8x512.
        draft: A draft model; None is the embedded one, where it fits.
        install_peers: Let pip get what peers need into virtual environments that are thrown away afterwards.
        prompts: The prompts of each workload, from 2 to 8.
        repeats: Rounds of each workload; None is 1 for `--model`, else 2.
        max_new_tokens: Length of an answer.
        seed: The seed of texts and questions.
        html: Write a page with figures ('-' for standard output).
    """

    random: Any = setting(None, metavar="LxW", parse=_sizes)
    draft: str | None = setting(None, metavar="NAME")
    arms: Any = setting(
        None,
        metavar="NAME",
        nargs="*",
        choices=BENCH_ARMS,
        help=f"ways to serve; all if none is named (default: {', '.join(CHOSEN_BENCH_ARMS)}), of "
        f"{', '.join(BENCH_ARMS)}",
    )
    workloads: Any = setting(
        None,
        metavar="NAME",
        nargs="+",
        choices=_ASKED,
        help=f"what is asked (default: all; for `--model`, those on real text: {', '.join(REAL_WORKLOADS)}), of "
        f"{', '.join(_ASKED)}",
    )
    peers: Any = setting(
        None,
        metavar="NAME",
        nargs="*",
        choices=PEERS,
        help=f"ways of others; all if none is named (default: {', '.join(CHOSEN_PEERS)}, or none with `--arms`), of "
        f"{', '.join(PEERS)}",
    )
    install_peers: bool = False
    prompts: int = setting(6, parse=positive)
    repeats: int | None = setting(None, parse=positive)
    max_new_tokens: int = setting(16, parse=positive)
    seed: int = 0
    html: Path | None = setting(None, metavar="FILE", parse=output_path)


@dataclass
class VerifyFlags:
    """Flags of `verify`.

    Args:
        prompts: A prompt on each line, or a JSON list of texts; taken as they are, without a chat template, and served
            in this order; None is made-up documents in changing orders, with questions that need one or two of them.
        documents: Texts that the prompts hold, one in each file: measure a second time with these stored first, each
            computed alone.
        codec: Judge codecs of stored K/V, too, read back from a store: int8, int8:4, int4, turboquant:3.5, …
        live_quant: The same for K/V in use, by bits from 1 to 4, or by codec; and each pair of the two.
        max_new_tokens: Length of an answer.
        max_kl: Threshold: mean KL in nats.
        min_agreement: Threshold: share of steps.
        figure: Draw quality against computed tokens.
    """

    prompts: Path | None = setting(None, metavar="FILE")
    documents: Path | None = setting(None, metavar="FILE", nargs="+")
    arms: str | None = setting(
        None,
        metavar="NAME",
        nargs="+",
        help=f"how moved chunks are repaired, beside exact and naive reuse (default: {' '.join(CHOSEN_VERIFY_ARMS)}); "
        "also query, cacheblend and first_k at six ratios or at one, as in query:15, and all",
    )
    codec: tuple[str, ...] = setting((), nargs="+")
    live_quant: tuple[KVQuantConfig, ...] = setting((), metavar="BITS", nargs="+", parse=_live)
    max_new_tokens: int = setting(32, parse=positive)
    max_kl: float = 0.01
    min_agreement: float = 0.99
    figure: Path | None = setting(None, metavar="PNG", parse=figure_file)


@dataclass
class JsonFlag:
    """The flag of commands that write what they show.

    Args:
        json: Write all of it ('-' for standard output).
    """

    json: Path | None = setting(None, metavar="FILE", parse=output_path)


@dataclass
class FitsFlags:
    """Flags of `fits`, besides those of `StreamingConfig`.

    Args:
        model: A hub name or a folder; only its configuration is read.
        bits: Bits of weights; None is those of the checkpoint.
        on: What computes.
    """

    model: str | None = None
    bits: int | None = setting(None, choices=(4, 16))
    on: Literal["gpu", "cpu"] = "gpu"


@dataclass
class WarmFlags:
    """Flags of `warm`, besides those that a server has, too.

    Args:
        documents: They may stand anywhere in prompts (mode 'blend').
        system: Each is the system message of chats, put into the chat template, as a server does with it.
        chat: Each is JSON with the first messages of chats, and perhaps tools, as the server's /v1/warm takes them.
        prefix: With --documents: a text that stands before each.
    """

    documents: bool = False
    system: bool = False
    chat: bool = False
    prefix: Path | None = setting(None, metavar="FILE")


@dataclass
class InspectFlags:
    """Flags of `inspect`.

    Args:
        tiers: What to look into, such as disk:~/.cache/kvboost_hf or redis://localhost:6379.
        tokenizer: Shows text; a hub name or folder, or 'embedded'.
        limit: Show those used most.
    """

    tiers: tuple[str, ...] = setting((), metavar="ADDRESS", nargs="+")
    tokenizer: str | None = setting(None, metavar="NAME")
    limit: int = setting(50, parse=positive)


@dataclass
class PruneFlags:
    """Flags of `prune`.

    Args:
        dry_run: Only list what would be removed.
    """

    dry_run: bool = False


_FLAGS: dict[str, tuple[type, ...]] = {
    "demo": (ModelFlags, DemoFlags, JsonFlag),
    "bench": (ModelFlags, BenchFlags, JsonFlag),
    "doctor": (ModelFlags,),
    "check": (ModelFlags,),
    "verify": (ModelFlags, VerifyFlags, JsonFlag),
    "fits": (FitsFlags,),
    "warm": (ConfigFlag, ModelFlags, WarmFlags),
    "serve": (ConfigFlag, ModelFlags),
    "inspect": (InspectFlags, JsonFlag),
    "prune": (PruneFlags,),
}
_NEEDED = {"fits": ("model", "vram_budget"), "inspect": ("tiers",)}  # by command, the flags that must be given


def add_command_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the flags of a command of `kvboost-hf`."""
    found: dict[str, argparse.Action] = {}
    for kind in _FLAGS[command]:
        found |= add_flags(parser, kind)
    if command == "serve":
        add_options(parser)
    elif command == "warm":
        text = "texts; each is the start of prompts"
        parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=text)
        alike = parser.add_argument_group(ALIKE)
        add_flags(alike, ServerSettings, KEYS)
        add_flags(alike, AlikeFlags)
        add_flags(alike, EngineSettings, ALIKE)
        add_flags(alike, ServerSettings, ALIKE)
        add_streaming(parser)
    elif command == "fits":
        found |= add_flags(parser, StreamingConfig, PLANNED)
    elif command == "prune":
        parser.add_argument("folder", metavar="FOLDER", help="the `disk_folder` that layers are streamed from")
    for name in _NEEDED.get(command, ()):
        found[name].required = True
