"""Settings of a server from its parsed flags, files of keys, and the environment."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_hf.cache.tiers.record import read_tier_key
from kvboost_hf.config import DraftTreeConfig, RecomputeStrategy, StreamingConfig
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.fields import given
from kvboost_hf.server.settings import ServerSettings, TlsFiles, read_keys

_STREAMING = (
    *("streaming_mode", "keep_first_k", "keep_last_k", "vram_budget"),
    *("n_staging_slots", "disk_folder", "host_budget"),
)
_WITH_RATIO = (
    RecomputeStrategy.AUTO,
    RecomputeStrategy.CACHEBLEND,
    RecomputeStrategy.QUERY,
    RecomputeStrategy.FIRST_K,
)
_TRACED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SECRETS = ("api_key", "operator_key")


def add_secrets(options: argparse.Namespace, environment: Mapping[str, str], names: Sequence[str] = _SECRETS) -> None:
    """Add keys from files and from the environment to the parsed flags.

    Args:
        options: The parsed flags; keys that are found are added to them.
        environment: The environment of the process.
        names: The kinds of keys to look for.

    Raises:
        ValueError: A file cannot be read, holds no key, or is open to other users.
    """
    for name in names:
        file, value = getattr(options, f"{name}_file"), environment.get(f"KVBOOST_HF_{name.upper()}")
        given = [*getattr(options, name), *(read_keys(file) if file is not None else ())]
        setattr(options, name, [*given, value] if value else given)
    options.ssl_keyfile_password = environment.get("KVBOOST_HF_SSL_KEYFILE_PASSWORD")


def wants_traces(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the server sends traces: as `--otel` says, else if the environment says where to."""
    return any(map(environment.get, _TRACED)) if options.otel is None else bool(options.otel)


def server_settings(options: argparse.Namespace, name: str, positions: int | None) -> ServerSettings:
    """The `ServerSettings` of the parsed flags.

    Args:
        options: The parsed flags.
        name: What clients call the model without `--model-name`.
        positions: The number of positions of the model; None where it is not known.

    Raises:
        ValueError: A value is out of its range, or values do not go together.
    """
    told = given(ServerSettings, options)
    told["model_name"] = told["model_name"] or name
    told["max_model_len"] = told["max_model_len"] or positions
    if not options.oom_planning:
        told["safety_margin"] = None
    told |= {"api_keys": tuple(options.api_key), "operator_keys": tuple(options.operator_key)}
    return ServerSettings(**told, salt=options.salt, tls=_tls_files(options))


def kept_settings(options: argparse.Namespace, **more: Any) -> EngineSettings:
    """The `EngineSettings` of the flags that `add_kept` adds.

    Args:
        options: The parsed flags.
        more: Other settings.

    Raises:
        ValueError: A value is out of its range, or values do not go together.
        OSError: The file of `--tier-key-file` cannot be read.
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
    """The `EngineSettings` of all flags of a server.

    Raises:
        ValueError: A value is out of its range, or values do not go together.
        OSError: The file of `--tier-key-file` cannot be read.
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
        recompute_ratio=ratio,
        sink_tokens=options.sink_tokens,
        overlap_k=options.overlap_k,
        progressive=options.progressive,
        max_cache_bytes=options.max_cache_bytes,
    )


def streaming_config(options: argparse.Namespace) -> StreamingConfig | None:
    """The `StreamingConfig` of the parsed flags; None without `--awq-streaming`.

    A budget makes room for as much K/V as requests may take, where flags say how much that is.

    Raises:
        ValueError: A value is out of its range, or given without `--awq-streaming`.
    """
    given = {name: getattr(options, name) for name in _STREAMING if getattr(options, name) is not None}
    if not options.awq_streaming:
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flags} must be left out without `--awq-streaming`. Pass both to stream layers.")
        return None
    mode = given.pop("streaming_mode", StreamingConfig().residency_mode)
    live_tokens = getattr(options, "max_live_tokens", None) or getattr(options, "max_model_len", None)
    if live_tokens is not None:
        given |= {"max_tokens": live_tokens, "prefill_chunk_size": options.prefill_chunk_size}
    return StreamingConfig(residency_mode=mode, **given)


_DRAFTS = ("auto", "mtp", "lookup", "none")
_HEADS = ("eagle", "dflash")


def draft_kind(options: argparse.Namespace) -> tuple[str, str]:
    """What drafts, by the parsed flags: one of `_DRAFTS`, or `"draft"` or `"heads"` and the name of these.

    Raises:
        ValueError: There is no such kind, or two flags name other drafts.
    """
    asked, name = options.speculative, options.speculative_draft_model
    kind, _, named = (asked or "").partition(":")
    if asked is None or (asked == "auto" and name is not None):
        return ("draft", name) if name is not None else ("none", "")
    if kind == "draft" and named and name in (None, named):
        return "draft", named
    if name is None and ((kind in _HEADS and named) or asked == "mtp") and not keeps_hidden_states(options):
        raise ValueError(
            f"`--speculative {asked}` reads hidden states, which are kept neither with `--live-quant` nor of moved "
            "chunks. Leave out `--live-quant` and `--recompute-strategy`, or pass `lookup`."
        )
    if kind in _HEADS and named and name is None:
        return "heads", named
    if asked in _DRAFTS and name is None:
        return asked, ""
    if name is not None:
        raise ValueError(
            f"`--speculative {asked}` and `--speculative-draft-model {name}` name two kinds of drafts. Pass one of "
            "the two."
        )
    kinds = ", ".join([*_DRAFTS, "draft:NAME", *(f"{each}:NAME" for each in _HEADS)])
    raise ValueError(f"`--speculative` must be one of {kinds}, got {asked!r}.")


def keeps_hidden_states(options: argparse.Namespace) -> bool:
    """Whether a server with these flags can keep hidden states, which heads read."""
    return options.live_quant is None and options.recompute_strategy == "exact"


def draft_trees(options: argparse.Namespace) -> DraftTreeConfig | None:
    """The `DraftTreeConfig` of the parsed flags; None for no drafts.

    Raises:
        ValueError: A value is out of its range, values do not go together, or there is no draft model.
    """
    policy, gamma = options.speculative_mode_policy, options.speculative_gamma
    sizes = {
        "branching": options.speculative_tree_max_branching,
        "depth": options.speculative_tree_max_depth,
        "max_nodes": options.speculative_tree_node_budget,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    kind, _ = draft_kind(options)
    if policy == "none":
        return None
    if kind == "none":
        if given or policy is not None or gamma is not None:
            raise ValueError(
                "Drafts need `--speculative-draft-model`, or `--speculative lookup`. Pass one, or no other "
                "`--speculative-` flag."
            )
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
