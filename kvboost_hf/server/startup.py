"""Says what a server does while it starts, and then what it has chosen: to a terminal, or to the log."""

import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from kvboost_hf import __version__
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.tiers.base import Kind
from kvboost_hf.compat import attn_implementation, bytes_per_token, input_device
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.outputs import Progress
from kvboost_hf.server.chats.tool_formats import ToolSupport
from kvboost_hf.server.engine.worker import ModelEngine
from kvboost_hf.server.http.guard import JsonLines
from kvboost_hf.server.settings import ServerSettings
from kvboost_hf.server.tier_check import LOOKED_AT, InTiers

_log = logging.getLogger("kvboost_hf.server")
_ANY = ("0.0.0.0", "::")  # addresses to listen at that nobody can call


class Chosen(SimpleNamespace):
    """The choices that a server has made, as the log has them."""

    @classmethod
    def of(
        cls,
        engine: ModelEngine,
        settings: ServerSettings,
        kept: EngineSettings,
        *,
        attention_reason: str,
        in_tiers: InTiers | None,
        drafts: str | None,
    ) -> "Chosen":
        """The choices of a server with these parts."""
        model = engine.model
        stats = engine.store.stats()["tiers"]
        tiers = {
            name: {"location": location, "bytes": stats[name].get("bytes", 0)}
            for name, location in engine.store.places().items()
        }
        durable = ModelState.of(model).fingerprint.durable(model) if tiers else ""
        found = in_tiers.found if in_tiers is not None else ()
        per_token, live = bytes_per_token(model), engine.max_live_tokens
        return cls(
            model=settings.model_name,
            model_class=type(model).__name__,
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(input_device(model)),
            threads=torch.get_num_threads(),
            attention=attn_implementation(model),
            attention_reason=attention_reason,
            max_model_len=engine.max_model_len,  # tokens of a prompt and its answer
            max_batch_size=settings.max_batch_size,
            max_queue_size=settings.max_queue_size,
            max_live_tokens=live,  # of K/V of all running requests, as planned; None for no plan
            live_bytes=live * per_token if live is not None and per_token else None,
            store_bytes=engine.store.max_bytes,
            store_tokens=engine.store.max_bytes // per_token if per_token else None,
            codec=engine.store.codec.name,
            tiers=tiers,
            # of other models, too; counted up to 10,000
            tier_chunks=len(in_tiers.held) if in_tiers is not None else 0,
            found_chunks=len(found),
            found_tokens=sum(len(entry.tokens) for entry in found if entry.kind is not Kind.STATES),
            fingerprint=durable.hex()[:12] if isinstance(durable, bytes) else None,
            recompute_strategy=str(kept.recompute_strategy or "exact"),
            drafts=drafts,
            api_keys=len(settings.api_keys),
            operator_keys=len(settings.operator_keys),
            chats=getattr(engine.tokenizer, "chat_template", None) is not None,
            # in whose format calls of tools are found, or why requests with tools are refused
            tools=ToolSupport.of(engine.tokenizer).told,
        )

    def page(self, url: str) -> str:
        """Lines for a person, with the address that the server listens at."""
        rows = [
            ("model", f"{self.model_class}, {_short(self.parameters)} parameters, {self.dtype}, on {self.device}"),
            ("threads", str(self.threads)),
            ("attention", f"{self.attention}: {self.attention_reason}"),
            ("context", self._context),
            ("at once", self._at_once),
            ("store", self._store),
            *((name, f"{tier['location']} ({_size(tier['bytes'])} held)") for name, tier in self.tiers.items()),
            *([("in tiers", self._in_tiers)] if self.tiers else ()),
            ("reuse", self._reuse),
            ("tools", self.tools),
            ("drafts", self.drafts or "none (--speculative-draft-model)"),
            ("API keys", str(self.api_keys or "none: everybody who reaches the address may ask (--api-key-file)")),
            ("address", f"{url}/v1, and a page to try it at {url}/"),
        ]
        lines = "".join(f"  {name:<10} {value}\n" for name, value in rows)
        return f"\nkvboost_hf {__version__} serves {self.model}\n{lines}\nTo try it:\n  {self._curl(url)}\n\n"

    @property
    def _context(self) -> str:
        told = f"{self.max_model_len:,} tokens of a prompt and its answer"
        return f"{told}, as many as memory has room for" if self.max_live_tokens == self.max_model_len else told

    @property
    def _at_once(self) -> str:
        told = f"{self.max_batch_size} requests run and {self.max_queue_size} wait"
        if self.max_live_tokens is None:
            return f"{told}; memory is not planned"
        size = f" ({_size(self.live_bytes)})" if self.live_bytes is not None else ""
        return f"{told}; {self.max_live_tokens:,} tokens of K/V{size} in all, as memory allows"

    @property
    def _store(self) -> str:
        raw = self.store_tokens if self.codec == "raw" else None
        room = f", for {raw:,} tokens" if raw is not None else f", codec {self.codec}"
        below = "" if self.tiers else "; gone after a restart (--disk-cache-dir)"
        return f"{_size(self.store_bytes)} of host memory{room}{below}"

    @property
    def _in_tiers(self) -> str:
        held = f"the first {self.tier_chunks:,}" if self.tier_chunks >= LOOKED_AT else f"{self.tier_chunks:,}"
        by = f", by the fingerprint {self.fingerprint}" if self.fingerprint is not None else ""
        return f"{self.found_chunks:,} of {held} chunks are found, {self.found_tokens:,} tokens{by}"

    @property
    def _reuse(self) -> str:
        if self.recompute_strategy == "exact":
            return "exact: answers are those of plain generate()"
        return f"{self.recompute_strategy}: K/V moves, and answers may differ from those of plain generate()"

    def _curl(self, url: str) -> str:
        key = ' -H "Authorization: Bearer $KEY"' if self.api_keys else ""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
        path, body = ("chat/completions", asked) if self.chats else ("completions", {"prompt": "Hello"})
        told = shlex.quote(json.dumps({"model": self.model, **body, "max_tokens": 32}))
        return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {told}"


def write_log(level: str) -> None:
    """Write the log to standard error: lines for a person if that is a terminal, else lines of JSON."""
    terminal = sys.stderr.isatty()
    handler = logging.StreamHandler()
    handler.setFormatter(TextLines() if terminal else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # At its start and end it says what this server says, too.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    if not terminal:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class TextLines(logging.Formatter):
    """Formats records as lines for a person, with the `fields` that they were given."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.getMessage()} {fields}"
        # No character of a client's moves a terminal's cursor.
        line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line.rstrip())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Startup:
    """Reports the stages of a start, and its end: to standard error if it is a terminal, else to the log.

    With a log level above `"info"` nothing is reported.
    """

    def __init__(self, *, terminal: bool | None = None) -> None:
        told = _log.isEnabledFor(logging.INFO)
        self._terminal = told and (sys.stderr.isatty() if terminal is None else terminal)
        self._shown = Progress()

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Report the stage that runs inside the context, such as "loading the model", and its seconds."""
        start = time.perf_counter()
        if self._terminal:
            sys.stderr.write(f"{what[0].upper()}{what[1:]} …\n")
            yield
        else:
            with Progress(
                what, lambda line: _log.info("%s", line, extra={"fields": {"running": what}})
            ) as self._shown:
                yield
        seconds = round(time.perf_counter() - start, 3)
        if self._terminal:
            sys.stderr.write(f"  took {seconds:.1f} s\n")
        else:
            _log.info("%s took %.1f s", what, seconds, extra={"fields": {"stage": what, "seconds": seconds}})

    @contextmanager
    def progress(self, tokens: int) -> Iterator[Callable[[int], object]]:
        """Show in a stage how many of its tokens are done; yields what is called with each number of tokens more."""
        if self._terminal:
            with tqdm(total=tokens, unit=" tokens", unit_scale=True, leave=False) as bar:
                yield bar.update
            return
        done = 0

        def update(more: int) -> None:
            nonlocal done
            done += more
            self._shown.show("warming tokens", done, tokens)

        yield update

    def ended(self, chosen: Chosen, urls: Sequence[str]) -> None:
        """Report what was chosen, and the addresses that the server listens at."""
        if self._terminal:
            sys.stderr.write(chosen.page(_callable(urls[0])))
        else:
            fields = {**vars(chosen), "urls": list(urls)}
            _log.info("listening at %s", ", ".join(urls), extra={"fields": fields})


def _callable(url: str) -> str:
    """The address for a client on this machine."""
    for address in _ANY:
        url = url.replace(f"//{address}:", "//127.0.0.1:").replace(f"//[{address}]:", "//127.0.0.1:")
    return url


def _short(count: float) -> str:
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}B"


def _size(nbytes: float | None) -> str:
    size = nbytes or 0.0
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
