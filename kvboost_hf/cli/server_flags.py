"""The flags of `kvboost-hf serve` and `kvboost-hf warm`; `server_settings` makes settings of them."""

import argparse
from pathlib import Path
from typing import get_args

from kvboost_hf.config import (
    DEFAULT_CHUNK_SIZE,
    DraftTreeConfig,
    RecomputeStrategy,
    ResidencyMode,
    ReusePolicy,
    StreamingConfig,
    parse_size,
)
from kvboost_hf.fields import add_flags
from kvboost_hf.old_names import TABLE, refuse
from kvboost_hf.server.settings import ACCESS, LOAD, ServerSettings

REFUSED = "server flags"  # the section of the table of migration
_POLICY, _TREES, _STREAMING = ReusePolicy(), DraftTreeConfig(), StreamingConfig()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a server, but for those of its model."""
    _add_access(parser)
    _add_load(parser)
    _add_reuse(parser)
    add_streaming(parser)
    _add_drafts(parser)
    for entry in TABLE[REFUSED]:
        for flag in entry.names if entry.refused else ():
            parser.add_argument(flag, action=_Refused, nargs="*", help=argparse.SUPPRESS)


def add_api_keys(parser: argparse._ActionsContainer) -> None:
    """Add the flags of API keys, which separate the prompts of clients; `add_secrets` reads the files."""
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="accept this API key; repeatable; the key in KVBOOST_HF_API_KEY of the environment is accepted, too",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="accept the API keys in this file, one a line; unlike --api-key it hides them from the list of processes",
    )


def add_kept(parser: argparse._ActionsContainer) -> None:
    """Add the flags that say where K/V is kept, and those that processes must have alike to share it.

    `serve` and `warm` have them with the same defaults, beside the flags of the model and of API keys.
    """
    parser.add_argument(
        "--attn-implementation",
        metavar="NAME",
        help="the model's attention, which its K/V depends on; with kvboost_fa2, requests read shared K/V once "
        "(default: kvboost_fa2 on a CPU where the model allows it, else the model's own)",
    )
    parser.add_argument(
        "--chunk-size",
        default=DEFAULT_CHUNK_SIZE,
        type=int,
        help="tokens of a chunk, a multiple of 16 (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-boundary-window",
        type=int,
        metavar="TOKENS",
        help="cut by content, and let cuts move so far to the end of a sentence; 0 cuts at multiples of --chunk-size "
        "(default: 16, or 0 with chunks of 16)",
    )
    parser.add_argument("--kv-cache-bits", type=int, choices=(4, 8, 16), help="bits of stored K/V (default: 16)")
    parser.add_argument(
        "--codec",
        help="codec of stored K/V, in place of --kv-cache-bits: raw, int8, int8:4, int4, turboquant:3.5, …",
    )
    parser.add_argument(
        "--live-quant",
        metavar="BITS",
        help="quantize the K/V of running requests, too: bits of turboquant, or the name of a codec (default: no)",
    )
    parser.add_argument(
        "--salt", default="", help="separates prompts from those of other salts, besides API keys (default: none)"
    )
    parser.add_argument("--disk-cache-dir", metavar="FOLDER", help="keep up to 10 GB of K/V here for later processes")
    parser.add_argument(
        "--tiers",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="keep K/V in these tiers, such as disk:~/.cache/kvboost_hf:50GB or redis://localhost:6379",
    )
    parser.add_argument(
        "--tier-key-file",
        metavar="FILE",
        help="seal K/V on disk and in tiers with the bytes of this file, 32 or more, and use no K/V without this seal",
    )


def add_streaming(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which layers of a model are streamed."""
    group = parser.add_argument_group("a model larger than its device")
    group.add_argument("--awq-streaming", action="store_true", help="stream layers that do not stay on the device")
    group.add_argument(
        "--streaming-mode",
        "--residency-mode",
        choices=get_args(ResidencyMode),
        metavar="MODE",
        help=f"{', '.join(get_args(ResidencyMode))} (default: {_STREAMING.residency_mode})",
    )
    group.add_argument("--keep-first-k", type=int, metavar="LAYERS", help="keep the first layers on the device")
    group.add_argument("--keep-last-k", type=int, metavar="LAYERS", help="keep the last layers on the device")
    group.add_argument("--vram-budget", metavar="SIZE", help="keep as many layers as fit into this on the device")
    group.add_argument(
        "--n-staging-slots",
        type=int,
        metavar="SLOTS",
        help=f"slots on the device that streamed layers take in turn (default: {_STREAMING.n_staging_slots})",
    )
    group.add_argument(
        "--disk-folder",
        metavar="FOLDER",
        help="keep streamed layers beyond --host-budget in files here; without a budget, all streamed layers",
    )
    group.add_argument(
        "--host-budget", metavar="SIZE", help="host memory for streamed layers, at most; needs --disk-folder"
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(ACCESS)
    add_flags(group, ServerSettings, ACCESS)
    add_api_keys(group)
    group.set_defaults(operator_key=[], ssl_keyfile_password=None)  # of no flag: see `add_secrets`
    group.add_argument(
        "--operator-key-file",
        type=Path,
        metavar="FILE",
        help="open /v1/stats and /metrics to the keys in this file and to KVBOOST_HF_OPERATOR_KEY of the environment "
        "alone",
    )
    _add_tls(group)
    levels = ("debug", "info", "warning", "error")
    group.add_argument("--log-level", default="info", choices=levels, help="least level to log (default: info)")
    group.add_argument(
        "--otel",
        action=argparse.BooleanOptionalAction,
        help="send traces by OpenTelemetry to the OTEL_EXPORTER_OTLP_ENDPOINT of the environment; needs the extra "
        "`otel` (default: if that is set)",
    )


def _add_tls(group: argparse._ActionsContainer) -> None:
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate for HTTPS (default: plain HTTP)")
    group.add_argument(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="private key of the certificate, if it is in another file; KVBOOST_HF_SSL_KEYFILE_PASSWORD of the "
        "environment is its password",
    )
    group.add_argument(
        "--ssl-ca-certs",
        type=Path,
        metavar="FILE",
        help="require of clients a certificate that one of these signs",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(LOAD)
    add_flags(group, ServerSettings, LOAD)
    group.add_argument(
        "--oom-planning",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="start a request only when its K/V has room in memory (default: yes)",
    )


def _add_reuse(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is kept, and how it is used again")
    group.add_argument(
        "--recompute-strategy",
        "--repair",
        choices=["exact", *map(str, RecomputeStrategy)],
        default="exact",
        help="'exact' gives the answers of plain generate(); with the others K/V moves, and answers may differ "
        "(default: exact)",
    )
    group.add_argument(
        "--recompute-ratio",
        type=float,
        metavar="SHARE",
        help="share of the moved tokens that auto, cacheblend, query and first_k compute again (default: 0.15, but no "
        "more than 128 tokens for each seam)",
    )
    group.add_argument(
        "--progressive",
        action=argparse.BooleanOptionalAction,
        default=_POLICY.progressive,
        help="go on with the repair before the second token until K/V is exact, or never (default: along with later "
        "tokens and in idle moments, where moved text has many seams)",
    )
    group.add_argument(
        "--sink-tokens",
        default=_POLICY.sink_tokens,
        type=int,
        help="first tokens of a prompt, which never move (default: %(default)s)",
    )
    group.add_argument(
        "--overlap-k",
        default=_POLICY.overlap_k,
        type=int,
        help="tokens before each seam that are computed again (default: %(default)s)",
    )
    group.add_argument("--max-cache-bytes", type=_size, metavar="SIZE", help="host memory for K/V (default: 4GiB)")
    add_kept(group)
    group.add_argument(
        "--warm",
        action="append",
        default=[],
        metavar="TEXT",
        help="compute this beginning of prompts before the server listens, and never evict it; for completions, since "
        "the chat template writes something before the texts of chats; repeatable",
    )
    group.add_argument(
        "--warm-chat",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="the same for chats that begin with these messages and tools: JSON, as /v1/warm takes it; repeatable",
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts")
    group.add_argument(
        "--speculative",
        metavar="KIND",
        help="'mtp' (layers of the checkpoint), 'eagle:NAME' and 'dflash:NAME' (heads that were trained for it), "
        "'draft:NAME' (a model) draft for a request that runs alone, 'lookup' (text that repeats) for all; 'auto' "
        "takes the draft model if there is one, else 'mtp' or 'lookup' (default: none, or the draft model)",
    )
    group.add_argument("--speculative-draft-model", metavar="NAME", help="a hub name or a folder (default: none)")
    group.add_argument(
        "--speculative-mode-policy",
        type=lambda text: "chain" if text == "flat" else text,  # as kvboost calls it
        choices=("auto", "chain", "tree", "none"),
        help="'auto' decides by what is accepted and how long it takes (default: auto, or chain with a gamma)",
    )
    for flag, metavar, text, default in (
        ("gamma", "TOKENS", "tokens of a chain, at most", _TREES.depth),
        ("tree-max-branching", None, "tokens behind one token", _TREES.branching),
        ("tree-max-depth", None, "levels of a tree, at most", _TREES.depth),
        ("tree-node-budget", None, "tokens of a tree, at most", _TREES.max_nodes),
    ):
        group.add_argument(f"--speculative-{flag}", type=int, metavar=metavar, help=f"{text} (default: {default})")


class _Refused(argparse.Action):
    """A flag that only kvboost has; it ends the program with the remedy."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        try:
            refuse(REFUSED, self.option_strings)
        except ValueError as error:
            parser.error(str(error))


def _size(text: str) -> int:
    size = int(float(text)) if text.replace(".", "").replace("e", "").isdigit() else parse_size(text)
    if not size:
        raise argparse.ArgumentTypeError(f"must be bytes, or text with a unit such as 8GB or 7.5GiB, got {text!r}")
    return size
