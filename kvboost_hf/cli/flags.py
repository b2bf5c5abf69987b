"""The flags of each command of `kvboost-hf`: `add_NAME` adds those of the command NAME.

Nothing here imports torch, so that help and errors of arguments come at once.
"""

import argparse
from pathlib import Path

from kvboost_hf.choices import (
    BENCH_ARMS,
    CHOSEN_BENCH_ARMS,
    CHOSEN_PEERS,
    CHOSEN_VERIFY_ARMS,
    PEERS,
    REAL_WORKLOADS,
    WORKLOADS,
)
from kvboost_hf.cli.arguments import add_json, add_model, figure, one_of, output, positive
from kvboost_hf.cli.config_file import add_config
from kvboost_hf.cli.server_flags import add_api_keys, add_kept, add_options, add_streaming
from kvboost_hf.config import KVQuantConfig


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model(parser)
    text = (
        "measure these in place of all else: a prompt on each line, or a JSON list of texts and of lists of messages"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=text)
    text = "repetitions to take medians over (default: 1 for a model that is named, else 3)"
    parser.add_argument("--repeats", type=positive, help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=24, help="length of an answer (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw the times to the first token")
    add_json(parser)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model(parser)
    parser.add_argument(
        "--random", type=_sizes, metavar="LxW", help="a random model of L layers, W wide, such as 8x512"
    )
    parser.add_argument("--draft", metavar="NAME", help="a draft model (default: the embedded one, where it fits)")
    text = f"ways to serve; all if none is named (default: {', '.join(CHOSEN_BENCH_ARMS)})"
    parser.add_argument("--arms", nargs="*", choices=BENCH_ARMS, metavar="NAME", help=one_of(BENCH_ARMS, text))
    asked = dict.fromkeys((*WORKLOADS, *REAL_WORKLOADS))
    real = f"(default: all; for `--model`, those on real text: {', '.join(REAL_WORKLOADS)})"
    text = one_of(asked, f"what is asked {real}")
    parser.add_argument("--workloads", nargs="+", choices=list(asked), metavar="NAME", help=text)
    text = f"ways of others; all if none is named (default: {', '.join(CHOSEN_PEERS)}, or none with `--arms`)"
    parser.add_argument("--peers", nargs="*", choices=PEERS, metavar="NAME", help=one_of(PEERS, text))
    text = "let pip get what peers need into virtual environments that are thrown away afterwards"
    parser.add_argument("--install-peers", action="store_true", help=text)
    parser.add_argument("--prompts", type=positive, default=6, help="of each workload, from 2 to 8 (default: 6)")
    text = "rounds of each workload (default: 1 for `--model`, else 2)"
    parser.add_argument("--repeats", type=positive, help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=16, help="length of an answer (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and questions (default: 0)")
    text = "write a page with figures ('-' for standard output)"
    parser.add_argument("--html", type=output, metavar="FILE", help=text)
    add_json(parser)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model(parser)


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt on each line, or a JSON list of texts; taken as they are, without a chat template, and served "
        "in this order (default: made-up documents in changing orders, with questions that need one or two of them)",
    )
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts that the prompts hold, one in each file: measure a second time with these stored first, each "
        "computed alone",
    )
    usual = " ".join(CHOSEN_VERIFY_ARMS)
    text = (
        f"how moved chunks are repaired, beside exact and naive reuse (default: {usual}); also query, "
        "cacheblend and first_k at six ratios or at one, as in query:15, and all"
    )
    parser.add_argument("--arms", nargs="+", metavar="NAME", help=text)
    text = "judge codecs of stored K/V, too, read back from a store: int8, int8:4, int4, turboquant:3.5, …"
    parser.add_argument("--codec", nargs="+", default=[], metavar="CODEC", help=text)
    text = "the same for K/V in use, by bits from 1 to 4, or by codec; and each pair of the two"
    parser.add_argument("--live-quant", nargs="+", type=_live, default=[], metavar="BITS", help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=32, help="length of an answer (default: 32)")
    parser.add_argument("--max-kl", type=float, default=0.01, help="threshold: mean KL in nats (default: 0.01)")
    parser.add_argument("--min-agreement", type=float, default=0.99, help="threshold: share of steps (default: 0.99)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw quality against computed tokens")
    add_json(parser)


def add_fits(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--model", required=True, help="a hub name or a folder; only its configuration is read")
    parser.add_argument("--vram-budget", required=True, metavar="SIZE", help="of the device, such as 8GB or 7.5GiB")
    parser.add_argument("--bits", type=int, choices=(4, 16), help="of weights (default: those of the checkpoint)")
    parser.add_argument("--max-tokens", type=positive, default=4096, help="in the context (default: 4096)")
    parser.add_argument("--prefill-chunk-size", type=positive, metavar="TOKENS", help="in one forward (default: all)")
    parser.add_argument("--on", choices=("gpu", "cpu"), default="gpu", help="what computes (default: gpu)")
    parser.add_argument(
        "--disk-folder", metavar="FOLDER", help="with --on cpu: read layers that do not stay from files here"
    )


def add_warm(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_config(parser)
    add_model(parser)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="texts; each is the start of prompts")
    parser.add_argument("--documents", action="store_true", help="they may stand anywhere in prompts (mode 'blend')")
    text = "each is the system message of chats, put into the chat template, as a server does with it"
    parser.add_argument("--system", action="store_true", help=text)
    text = "each is JSON with the first messages of chats, and perhaps tools, as the server's /v1/warm takes them"
    parser.add_argument("--chat", action="store_true", help=text)
    parser.add_argument("--prefix", type=Path, metavar="FILE", help="with --documents: a text that stands before each")
    finding = parser.add_argument_group(
        "what a server must have alike to find it, by the same flags with the same defaults"
    )
    add_api_keys(finding)
    add_kept(finding)
    add_streaming(parser)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_config(parser)
    add_model(parser)
    add_options(parser)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    text = "what to look into, such as disk:~/.cache/kvboost_hf or redis://localhost:6379"
    parser.add_argument("--tiers", nargs="+", required=True, metavar="ADDRESS", help=text)
    parser.add_argument("--tokenizer", metavar="NAME", help="shows text; a hub name or folder, or 'embedded'")
    parser.add_argument("--limit", type=positive, default=50, help="show those used most (default: 50)")
    add_json(parser, "write all of it ('-' for standard output)")


def add_prune(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="the `disk_folder` that layers are streamed from")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")


def _sizes(text: str) -> tuple[int, int]:
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and width.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be layers x width, such as 8x512, got {text}")
    return int(layers), int(width)


def _live(text: str) -> KVQuantConfig:
    from kvboost_hf.cache.codecs import live_config

    try:
        config = live_config(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if config is None:
        raise argparse.ArgumentTypeError(f"must be bits from 1 to 4 or a lossy codec, got {text}")
    return config
