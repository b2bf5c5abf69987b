"""The flags of `kvboost-hf serve` and `kvboost-hf warm`; `server_settings` makes settings of them."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvboost_hf.config import DRAFTS, STREAMED, DraftTreeConfig, StreamingConfig
from kvboost_hf.engine.settings import ALIKE, REUSED, EngineSettings
from kvboost_hf.fields import add_flags, setting
from kvboost_hf.old_names import TABLE, refuse
from kvboost_hf.server.settings import ACCESS, KEYS, LOAD, ServerSettings, TlsFiles

REFUSED = "server flags"  # the section of the table of migration


def _policy(text: str) -> str:
    return "chain" if text == "flat" else text  # as kvboost calls it


@dataclass
class AlikeFlags:
    """Flags that processes must have alike to share K/V, besides those of `EngineSettings`.

    Args:
        api_key_file: Accept the API keys in this file, one a line; unlike --api-key it hides them from the list of
            processes.
        attn_implementation: The model's attention, which its K/V depends on; with kvboost_fa2, requests read shared
            K/V once; None is kvboost_fa2 on a CPU where the model allows it, else the model's own.
        tier_key_file: Seal K/V on disk and in tiers with the bytes of this file, 32 or more, and use no K/V without
            this seal.
    """

    api_key_file: Path | None = setting(None, metavar="FILE")
    attn_implementation: str | None = setting(None, metavar="NAME")
    tier_key_file: str | None = setting(None, metavar="FILE")


@dataclass
class ServeFlags:
    """Flags of a server that are no fields of its settings, but decide about them.

    Args:
        operator_key_file: Open /v1/stats and /metrics to the keys in this file and to KVBOOST_HF_OPERATOR_KEY of the
            environment alone.
        log_level: Least level to log.
        otel: Send traces by OpenTelemetry to the OTEL_EXPORTER_OTLP_ENDPOINT of the environment; needs the extra
            "otel"; None is if that is set.
        oom_planning: Start a request only when its K/V has room in memory.
        warm: Compute this beginning of prompts before the server listens, and never evict it; for completions, since
            the chat template writes something before the texts of chats.
        warm_chat: The same for chats that begin with these messages and tools: JSON, as /v1/warm takes it.
        awq_streaming: Stream layers that do not stay on the device.
        speculative: 'mtp' (layers of the checkpoint), 'eagle:NAME' and 'dflash:NAME' (heads that were trained for it),
            'draft:NAME' (a model) or 'lookup' (text that repeats) drafts; 'auto' takes the draft model if there is
            one, else 'mtp' or 'lookup'; None is none, or the draft model.
        speculative_draft_model: A hub name or a folder; None is no drafts.
        speculative_mode_policy: 'auto' decides by what is accepted and how long it takes; None is auto, or chain with
            a gamma.
        speculative_gamma: Tokens of a chain, at most; None is as many as levels of a tree.
    """

    operator_key_file: Path | None = setting(None, group=ACCESS, metavar="FILE")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", group=ACCESS)
    otel: bool | None = setting(None, group=ACCESS)
    oom_planning: bool = setting(True, group=LOAD)
    warm: tuple[str, ...] = setting((), group=REUSED, metavar="TEXT")
    warm_chat: tuple[Path, ...] = setting((), group=REUSED, metavar="FILE")
    awq_streaming: bool = setting(False, group=STREAMED)
    speculative: str | None = setting(None, group=DRAFTS, metavar="KIND")
    speculative_draft_model: str | None = setting(None, group=DRAFTS, metavar="NAME")
    speculative_mode_policy: str | None = setting(
        None, group=DRAFTS, choices=("auto", "chain", "tree", "none"), parse=_policy
    )
    speculative_gamma: int | None = setting(None, group=DRAFTS, metavar="TOKENS")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a server, but for those of its model."""
    access, load, reused = map(parser.add_argument_group, (ACCESS, LOAD, REUSED))
    for group, kind, title in (
        (access, ServerSettings, ACCESS),
        (access, ServerSettings, KEYS),
        (access, TlsFiles, ACCESS),
        (access, ServeFlags, ACCESS),
        (load, ServerSettings, LOAD),
        (load, ServeFlags, LOAD),
        (reused, EngineSettings, REUSED),
        (reused, AlikeFlags, None),
        (reused, EngineSettings, ALIKE),
        (reused, ServerSettings, ALIKE),
        (reused, ServeFlags, REUSED),
    ):
        add_flags(group, kind, title)
    parser.set_defaults(operator_key=[], ssl_keyfile_password=None)  # of no flag: see `add_secrets`
    add_streaming(parser)
    drafts = parser.add_argument_group(DRAFTS)
    add_flags(drafts, ServeFlags, DRAFTS)
    add_flags(drafts, DraftTreeConfig, DRAFTS, unset=True)
    for entry in TABLE[REFUSED]:
        for flag in entry.names if entry.refused else ():
            parser.add_argument(flag, action=_Refused, nargs="*", help=argparse.SUPPRESS)


def add_streaming(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which layers of a model are streamed."""
    group = parser.add_argument_group(STREAMED)
    add_flags(group, ServeFlags, STREAMED)
    add_flags(group, StreamingConfig, STREAMED, unset=True)


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
