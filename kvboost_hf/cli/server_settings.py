"""Settings of a server from its parsed flags, files of keys, and the environment."""

import argparse
from collections.abc import Mapping, Sequence

from kvboost_hf.cache.tiers.record import read_tier_key
from kvboost_hf.config import STREAMED, DraftTreeConfig, RecomputeStrategy, StreamingConfig
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.fields import given
from kvboost_hf.server.settings import ServerSettings, TlsFiles, read_keys

_WITH_RATIO = (
    RecomputeStrategy.AUTO,
    RecomputeStrategy.CACHEBLEND,
    RecomputeStrategy.QUERY,
    RecomputeStrategy.FIRST_K,
)
_TRACED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SECRETS = ("api_key", "operator_key")


def add_secrets(options: argparse.Namespace, environment: Mapping[str, str], names: Sequence[str] = _SECRETS) -> None:
    """Add keys from files and from the environment to the parsed flags; `ValueError` for a bad file."""
    for name in names:
        file, value = getattr(options, f"{name}_file"), environment.get(f"KVBOOST_HF_{name.upper()}")
        keys = [*getattr(options, name), *(read_keys(file) if file is not None else ())]
        # A secret of Kubernetes often ends with a line end, which no header can hold.
        setattr(options, name, keys if value is None else [*keys, value.strip()])
    options.ssl_keyfile_password = environment.get("KVBOOST_HF_SSL_KEYFILE_PASSWORD")


def wants_traces(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the server sends traces: as `--otel` says, else if the environment says where to."""
    return any(map(environment.get, _TRACED)) if options.otel is None else bool(options.otel)


def server_settings(options: argparse.Namespace, name: str, positions: int | None) -> ServerSettings:
    """The `ServerSettings` of the parsed flags, or `ValueError`.

    `name` is what clients call the model without `--model-name`, `positions` how many the model has, if that is known.
    """
    told = given(ServerSettings, options)
    told["model_name"] = told["model_name"] or name
    told["max_model_len"] = told["max_model_len"] or positions
    if not options.oom_planning:
        told["safety_margin"] = None
    return ServerSettings(**told, operator_keys=tuple(options.operator_key), tls=_tls_files(options))


def engine_settings(options: argparse.Namespace) -> EngineSettings:
    """The `EngineSettings` of the parsed flags of a server, or of what is warmed for one, or `ValueError`."""
    told = given(EngineSettings, options)
    strategy, ratio = told.get("recompute_strategy") or "exact", told.get("recompute_ratio")
    if ratio is not None and strategy not in _WITH_RATIO:
        raise ValueError(
            f"`--recompute-ratio` must be left out with `--recompute-strategy {strategy}`, which does not use it, got "
            f"{ratio}. Pass one of {', '.join(_WITH_RATIO)}."
        )
    if strategy == "exact":
        told["recompute_strategy"] = None
    if options.tier_key_file is not None:
        told["tier_key"] = read_tier_key(options.tier_key_file)
    return EngineSettings(**told)


def streaming_config(options: argparse.Namespace) -> StreamingConfig | None:
    """The `StreamingConfig` of the parsed flags, or `ValueError`; None without `--awq-streaming`.

    A budget makes room for as much K/V as requests may take, where flags say how much that is.
    """
    told = {name: value for name, value in given(StreamingConfig, options, STREAMED).items() if value is not None}
    if not options.awq_streaming:
        if told:
            names = (name.replace("residency", "streaming").replace("_", "-") for name in told)
            raise ValueError(
                f"{', '.join(f'--{name}' for name in names)} must be left out without `--awq-streaming`. Pass both to "
                "stream layers."
            )
        return None
    live_tokens = getattr(options, "max_live_tokens", None) or getattr(options, "max_model_len", None)
    if live_tokens is not None:
        told |= {"max_tokens": live_tokens, "prefill_chunk_size": options.prefill_chunk_size}
    return StreamingConfig(**told)


_DRAFTS = ("auto", "mtp", "lookup", "none")
_HEADS = ("eagle", "dflash")


def draft_kind(options: argparse.Namespace) -> tuple[str, str]:
    """What drafts, by the parsed flags: one of `_DRAFTS`, or `"draft"` or `"heads"` and the name of these."""
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
    return options.live_quant is None and options.recompute_strategy in (None, "exact")


def draft_trees(options: argparse.Namespace) -> DraftTreeConfig | None:
    """The `DraftTreeConfig` of the parsed flags, or `ValueError`; None for no drafts."""
    policy, gamma = options.speculative_mode_policy, options.speculative_gamma
    sizes = {name: value for name, value in given(DraftTreeConfig, options).items() if value is not None}
    kind, _ = draft_kind(options)
    if policy == "none":
        return None
    if kind == "none":
        if sizes or policy is not None or gamma is not None:
            raise ValueError(
                "Drafts need `--speculative-draft-model`, or `--speculative lookup`. Pass one, or no other "
                "`--speculative-` flag."
            )
        return None
    if gamma is not None:
        if sizes or policy not in (None, "chain"):
            raise ValueError(
                f"`--speculative-gamma` ({gamma}) is the length of chains, and goes with no flag for trees. Pass "
                "`--speculative-tree-max-depth` for those."
            )
        policy, sizes = "chain", {"depth": gamma}
    return DraftTreeConfig(policy=policy or "auto", **sizes)


def _tls_files(options: argparse.Namespace) -> TlsFiles | None:
    told = given(TlsFiles, options)
    if told["certfile"] is None:
        if told["keyfile"] is not None or told["ca_certs"] is not None:
            raise ValueError(
                "`--ssl-keyfile` and `--ssl-ca-certs` need `--ssl-certfile`. Pass the server's certificate."
            )
        return None
    return TlsFiles(**told, password=options.ssl_keyfile_password)
