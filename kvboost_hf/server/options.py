"""The command line of the server, and the settings that follow from it."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from kvboost_hf.cache.tiers.sealed import read_tier_key
from kvboost_hf.config import DraftTreeConfig, ResidencyMode, StreamingConfig, parse_size
from kvboost_hf.engine.settings import EngineSettings, RecomputeStrategy
from kvboost_hf.migration import TABLE, refuse
from kvboost_hf.server.keys import read_keys
from kvboost_hf.server.settings import ServerSettings
from kvboost_hf.server.tls import TlsFiles

_FLAGS = "server flags"
_POLICIES = ("auto", "chain", "tree", "none")
_DEFAULTS, _KEPT, _TREES = ServerSettings(model_name="any"), EngineSettings(), DraftTreeConfig()
_STREAMED = StreamingConfig()
_STREAMING = (
    *("streaming_mode", "keep_first_k", "keep_last_k", "vram_budget"),
    *("n_staging_slots", "disk_folder", "host_budget"),
)
_WITH_RATIO = (RecomputeStrategy.CACHEBLEND, RecomputeStrategy.QUERY, RecomputeStrategy.FIRST_K)
_SECRETS = ("api_key", "operator_key")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what a server takes besides a model."""
    http = parser.add_argument_group("who may ask, and where")
    http.add_argument(
        "--host", default=_DEFAULTS.host, help="address to listen at (default: %(default)s, this machine alone)"
    )
    http.add_argument("--port", default=_DEFAULTS.port, type=int, help="and its port (default: %(default)s)")
    add_api_keys(http)
    http.set_defaults(operator_key=[], ssl_keyfile_password=None)  # of no flag: see `add_secrets`
    http.add_argument(
        "--operator-key-file",
        type=Path,
        metavar="FILE",
        help="with keys that open /v1/stats and /metrics, which are closed to all others then; and that of the "
        "environment's KVBOOST_HF_OPERATOR_KEY",
    )
    http.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="by which clients may call the server, besides localhost and its address; repeatable, * for any "
        "(default: any with API keys, no other without)",
    )
    http.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate for HTTPS (default: plain HTTP)")
    http.add_argument(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="its key, if that is in a file of its own; the password, if it has one, is that of the environment's "
        "KVBOOST_HF_SSL_KEYFILE_PASSWORD",
    )
    http.add_argument(
        "--ssl-ca-certs",
        type=Path,
        metavar="FILE",
        help="let in those alone whose certificate one of these vouches for",
    )
    http.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="of pages; repeatable")
    http.add_argument("--model-name", help="what clients call the model (default: its name, or that of its folder)")
    levels = ("debug", "info", "warning", "error")
    http.add_argument("--log-level", default="info", choices=levels, help="the least that is logged (default: info)")

    http.add_argument(
        "--embeddings",
        action="store_true",
        help="answer /v1/embeddings by the mean of the last hidden states: poor ones, for lack of training",
    )

    load = parser.add_argument_group("how much at once")
    load.add_argument(
        "--max-batch-size",
        default=_DEFAULTS.max_batch_size,
        type=int,
        help="requests that run at once (default: %(default)s)",
    )
    load.add_argument(
        "--max-connections",
        type=int,
        help="open at once, three quarters of them from one address (default: as many as the process may open files, "
        "less a fifth, and at most 4096)",
    )
    load.add_argument(
        "--max-queue-size",
        default=_DEFAULTS.max_queue_size,
        type=int,
        help="requests that wait; others get status 429 (default: %(default)s)",
    )
    load.add_argument(
        "--batch-window-ms",
        default=_DEFAULTS.batch_window_ms,
        type=float,
        help="wait so long for others to share a batch (default: %(default)s)",
    )
    load.add_argument(
        "--prefill-chunk-size",
        default=_DEFAULTS.prefill_chunk_size,
        type=int,
        metavar="TOKENS",
        help="of a prompt at a time (default: %(default)s)",
    )
    load.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="of prompt and answer (default: the model's)"
    )
    load.add_argument(
        "--max-live-tokens", type=int, metavar="TOKENS", help="of all requests together (default: what fits in memory)"
    )
    load.add_argument(
        "--planner-safety-margin",
        default=_DEFAULTS.safety_margin,
        type=float,
        metavar="SHARE",
        help="of the memory, to leave free (default: %(default)s)",
    )
    load.add_argument(
        "--oom-planning",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="see to it before a request starts that its K/V has room (default: yes)",
    )
    load.add_argument("--auto-truncate", action="store_true", help="leave out the beginning of prompts too long")
    load.add_argument(
        "--max-tokens",
        default=_DEFAULTS.default_max_tokens,
        type=int,
        help="of a chat's answer that is given no length (default: %(default)s)",
    )
    load.add_argument(
        "--timeout-s",
        default=_DEFAULTS.timeout_s,
        type=float,
        help="after which a request is given up (default: %(default)s)",
    )
    load.add_argument(
        "--drain-s",
        default=_DEFAULTS.drain_s,
        type=float,
        help="that requests have left when the server ends (default: %(default)s)",
    )

    reuse = parser.add_argument_group("what is kept, and how it is used again")
    reuse.add_argument(
        "--recompute-strategy",
        "--repair",
        choices=["exact", *map(str, RecomputeStrategy)],
        default="exact",
        help="'exact' gives the answers of plain generate(); with the others K/V moves, and answers may differ "
        "(default: exact)",
    )
    reuse.add_argument(
        "--recompute-ratio",
        type=float,
        metavar="SHARE",
        help="of the moved tokens, that cacheblend, query and first_k compute again "
        f"(default: {_KEPT.recompute_ratio})",
    )
    reuse.add_argument(
        "--sink-tokens",
        default=_KEPT.sink_tokens,
        type=int,
        help="the first ones, which never move (default: %(default)s)",
    )
    reuse.add_argument(
        "--overlap-k",
        default=_KEPT.overlap_k,
        type=int,
        help="tokens before each seam that are computed again (default: %(default)s)",
    )
    reuse.add_argument("--max-cache-bytes", type=_size, metavar="SIZE", help="host memory for K/V (default: 4GiB)")
    add_kept(reuse)
    reuse.add_argument(
        "--warm", action="append", default=[], metavar="TEXT", help="that prompts start with; pinned; repeatable"
    )
    add_streaming(parser)

    drafts = parser.add_argument_group("drafts of a smaller model, for a request that runs alone")
    drafts.add_argument("--speculative-draft-model", metavar="NAME", help="a hub name or a folder (default: none)")
    drafts.add_argument(
        "--speculative-mode-policy",
        type=_policy,
        choices=_POLICIES,
        help="'auto' decides by what is accepted and how long it takes (default: auto, or chain with a gamma)",
    )
    drafts.add_argument(
        "--speculative-gamma", type=int, metavar="TOKENS", help=f"of a chain, at most (default: {_TREES.depth})"
    )
    drafts.add_argument(
        "--speculative-tree-max-branching", type=int, help=f"tokens behind one token (default: {_TREES.branching})"
    )
    drafts.add_argument(
        "--speculative-tree-max-depth", type=int, help=f"levels of a tree, at most (default: {_TREES.depth})"
    )
    drafts.add_argument(
        "--speculative-tree-node-budget", type=int, help=f"tokens of a tree, at most (default: {_TREES.max_nodes})"
    )

    for entry in TABLE[_FLAGS]:
        for flag in entry.names if entry.refused else ():
            parser.add_argument(flag, action=_Refused, nargs="*", help=argparse.SUPPRESS)


def add_api_keys(parser: argparse._ActionsContainer) -> None:
    """Add the API keys, which separate prompts of those who ask; see `add_secrets`."""
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="of those who may ask; repeatable, and that of the environment's KVBOOST_HF_API_KEY besides",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="with such keys, one a line; unlike --api-key it does not show them in the list of processes",
    )


def add_kept(parser: argparse._ActionsContainer) -> None:
    """Add what K/V must have in common with that of another process to be found by it, and where it is kept.

    `serve` and `warm` have it alike, with the same defaults; beside it the model, its device and type, and API keys.
    """
    parser.add_argument(
        "--attn-implementation",
        metavar="NAME",
        help="of the model, on which its K/V depends; with kvboost_fa2, requests of the server read what they begin "
        "with together (default: kvboost_fa2 on a CPU where the model allows it, else the model's own)",
    )
    parser.add_argument(
        "--chunk-size", default=_KEPT.chunk_size, type=int, help="tokens, a multiple of 16 (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk-boundary-window",
        type=int,
        metavar="TOKENS",
        help="cut by content, and let cuts move so far to the end of a sentence; 0 cuts at multiples of --chunk-size "
        "(default: 16, or 0 with chunks of 16)",
    )
    parser.add_argument("--kv-cache-bits", type=int, choices=(4, 8, 16), help="of stored K/V (default: 16)")
    parser.add_argument(
        "--codec", help="of stored K/V, in place of --kv-cache-bits: raw, int8, int4, turboquant, turboquant:3.5, …"
    )
    parser.add_argument(
        "--live-quant",
        metavar="BITS",
        help="hold K/V of requests under way as codes, too: bits of turboquant, or the name of a codec (default: no)",
    )
    parser.add_argument(
        "--salt", default="", help="whose prompts they are, besides their API keys (default: nobody's)"
    )
    parser.add_argument("--disk-cache-dir", metavar="FOLDER", help="keeps up to 10 GB of K/V for later processes")
    parser.add_argument(
        "--tiers",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="other places for K/V, such as disk:~/.cache/kvboost_hf:50GB or redis://localhost:6379",
    )
    parser.add_argument(
        "--tier-key-file",
        metavar="FILE",
        help="its bytes, 32 or more, seal K/V on disk and in tiers, and what has no such seal is not used",
    )


def add_streaming(parser: argparse.ArgumentParser) -> None:
    """Add which layers of a model are streamed."""
    streaming = parser.add_argument_group("a model larger than its device")
    streaming.add_argument("--awq-streaming", action="store_true", help="stream layers that do not stay on the device")
    streaming.add_argument(
        "--streaming-mode",
        "--residency-mode",
        choices=get_args(ResidencyMode),
        metavar="MODE",
        help=f"{', '.join(get_args(ResidencyMode))} (default: {_STREAMED.residency_mode})",
    )
    streaming.add_argument("--keep-first-k", type=int, metavar="LAYERS", help="that stay")
    streaming.add_argument("--keep-last-k", type=int, metavar="LAYERS", help="that stay")
    streaming.add_argument("--vram-budget", metavar="SIZE", help="as many layers stay as fit into it")
    streaming.add_argument(
        "--n-staging-slots",
        type=int,
        metavar="SLOTS",
        help=f"on the device, that streamed layers take in turn (default: {_STREAMED.n_staging_slots})",
    )
    streaming.add_argument(
        "--disk-folder",
        metavar="FOLDER",
        help="for files of layers that are beyond --host-budget; without one, of all that are streamed",
    )
    streaming.add_argument(
        "--host-budget", metavar="SIZE", help="of host memory, that streamed layers take; with --disk-folder"
    )


def add_secrets(options: argparse.Namespace, environment: Mapping[str, str], names: Sequence[str] = _SECRETS) -> None:
    """Add what does not stand in the command line: keys from files and from the environment.

    Args:
        options: Parsed; what is found is added to it.
        environment: Of the process.
        names: Which kinds of keys there are.

    Raises:
        ValueError: for a file that cannot be read, holds no key, or is open to others.
    """
    for name in names:
        file, value = getattr(options, f"{name}_file"), environment.get(f"KVBOOST_HF_{name.upper()}")
        given = [*getattr(options, name), *(read_keys(file) if file is not None else ())]
        setattr(options, name, [*given, value] if value else given)
    options.ssl_keyfile_password = environment.get("KVBOOST_HF_SSL_KEYFILE_PASSWORD")


def server_settings(options: argparse.Namespace, name: str, positions: int | None) -> ServerSettings:
    """Of the parsed options.

    Args:
        options: Parsed.
        name: Of the model, if clients are to use no other.
        positions: That the model has, if that is known.
    """
    return ServerSettings(
        model_name=options.model_name or name,
        host=options.host,
        port=options.port,
        api_keys=tuple(options.api_key),
        operator_keys=tuple(options.operator_key),
        salt=options.salt,
        allowed_hosts=tuple(options.allowed_host),
        tls=_tls_files(options),
        max_connections=options.max_connections,
        cors_origins=tuple(options.cors_origin),
        max_batch_size=options.max_batch_size,
        max_queue_size=options.max_queue_size,
        batch_window_ms=options.batch_window_ms,
        prefill_chunk_size=options.prefill_chunk_size,
        max_model_len=options.max_model_len or positions,
        max_live_tokens=options.max_live_tokens,
        safety_margin=options.planner_safety_margin if options.oom_planning else None,
        embeddings=options.embeddings,
        auto_truncate=options.auto_truncate,
        default_max_tokens=options.max_tokens,
        timeout_s=options.timeout_s,
        drain_s=options.drain_s,
    )


def kept_settings(options: argparse.Namespace, **more: Any) -> EngineSettings:
    """What `add_kept` has added, and other settings.

    Raises:
        ValueError: for values that are none, or do not go together.
        OSError: if the file with the key of tiers cannot be read.
    """
    return EngineSettings(
        chunk_size=options.chunk_size,
        chunk_boundary_window=options.chunk_boundary_window,
        kv_cache_bits=options.kv_cache_bits,
        codec=options.codec,
        live_quant=options.live_quant,
        disk_cache_dir=options.disk_cache_dir,
        tiers=options.tiers,
        tier_key=read_tier_key(options.tier_key_file) if options.tier_key_file is not None else None,
        **more,
    )


def engine_settings(options: argparse.Namespace) -> EngineSettings:
    """What a server keeps, and how it is used again.

    Raises:
        ValueError: as `kept_settings`, and for a ratio that the strategy does not use.
        OSError: as `kept_settings`.
    """
    strategy, ratio = options.recompute_strategy, options.recompute_ratio
    if ratio is not None and strategy not in _WITH_RATIO:
        raise ValueError(
            f"`--recompute-ratio` must be left out with `--recompute-strategy {strategy}`, which does not use it, got "
            f"{ratio}. Pass one of {', '.join(_WITH_RATIO)}."
        )
    return kept_settings(
        options,
        recompute_strategy=None if strategy == "exact" else strategy,
        recompute_ratio=_KEPT.recompute_ratio if ratio is None else ratio,
        sink_tokens=options.sink_tokens,
        overlap_k=options.overlap_k,
        max_cache_bytes=options.max_cache_bytes,
    )


def streaming_config(options: argparse.Namespace) -> StreamingConfig | None:
    """Which layers are streamed; None for none.

    Raises:
        ValueError: for values that are none, or without `--awq-streaming`.
    """
    given = {name: getattr(options, name) for name in _STREAMING if getattr(options, name) is not None}
    if not options.awq_streaming:
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flags} must be left out without `--awq-streaming`.")
        return None
    mode = given.pop("streaming_mode", _STREAMED.residency_mode)
    return StreamingConfig(residency_mode=mode, **given)


def draft_trees(options: argparse.Namespace) -> DraftTreeConfig | None:
    """How large trees of drafts are; None for no drafts.

    Raises:
        ValueError: for values that are none, do not go together, or lack a draft model.
    """
    policy, gamma = options.speculative_mode_policy, options.speculative_gamma
    sizes = {
        "branching": options.speculative_tree_max_branching,
        "depth": options.speculative_tree_max_depth,
        "max_nodes": options.speculative_tree_node_budget,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    if policy == "none":
        return None
    if options.speculative_draft_model is None:
        if given or policy is not None or gamma is not None:
            raise ValueError("Drafts need `--speculative-draft-model`. Pass one, or no other `--speculative-` flag.")
        return None
    if gamma is not None:
        if given or policy not in (None, "chain"):
            raise ValueError(
                f"`--speculative-gamma` ({gamma}) is the length of chains, and goes with no flag for trees. Pass "
                "`--speculative-tree-max-depth` for those."
            )
        policy, given = "chain", {"depth": gamma}
    return DraftTreeConfig(policy=policy or "auto", **given)


def _tls_files(options: argparse.Namespace) -> TlsFiles | None:
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None or options.ssl_ca_certs is not None:
            raise ValueError(
                "`--ssl-keyfile` and `--ssl-ca-certs` need `--ssl-certfile`. Pass the server's certificate."
            )
        return None
    return TlsFiles(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        password=options.ssl_keyfile_password,
        ca_certs=options.ssl_ca_certs,
    )


def _policy(text: str) -> str:
    return "chain" if text == "flat" else text  # as kvboost calls it


class _Refused(argparse.Action):
    """A flag that only kvboost has."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        try:
            refuse(_FLAGS, self.option_strings)
        except ValueError as error:
            parser.error(str(error))


def _size(text: str) -> int:
    size = int(float(text)) if text.replace(".", "").replace("e", "").isdigit() else parse_size(text)
    if not size:
        raise argparse.ArgumentTypeError(f"must be bytes, or text with a unit such as 8GB or 7.5GiB, got {text!r}")
    return size
