"""`serve`: runs a server in this process until SIGTERM or SIGINT."""

import logging
import queue
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import FastAPI
from transformers import PreTrainedModel

from kvboost_hf.assisted.heads import Heads
from kvboost_hf.assisted.lookup import LookupAssistant
from kvboost_hf.cache.prompt.chats import ChatTemplate, Start, why_not_stored
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import input_device
from kvboost_hf.config import DraftTreeConfig
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.fields import shared
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.app import make_app
from kvboost_hf.server.chats.tool_formats import ToolSupport
from kvboost_hf.server.engine.intake import EngineLimits
from kvboost_hf.server.engine.model_runner import live_token_bytes, tokens_that_fit
from kvboost_hf.server.engine.neighbours import MemoryPlans
from kvboost_hf.server.engine.worker import ModelEngine
from kvboost_hf.server.generation.sharing import choose_attention
from kvboost_hf.server.http.listen import FrontServer
from kvboost_hf.server.jobs import Finished, Job, JobEvent, Keep, SamplingDefaults, SamplingOptions, prompt_salt
from kvboost_hf.server.requests.texts import WarmRequest
from kvboost_hf.server.settings import ServerSettings
from kvboost_hf.server.startup import Chosen, Startup
from kvboost_hf.server.tier_check import InTiers, unfound

_log = logging.getLogger("kvboost_hf.server")

_SHOWN_EVERY_S = 0.2
_CLIENT_SHARE = 0.75  # where there are others: so much of the queue and of the memory may be one key's


def serve(
    model: PreTrainedModel,
    tokenizer: Any,
    settings: ServerSettings,
    kept: EngineSettings,
    *,
    draft: PreTrainedModel | None = None,
    draft_trees: DraftTreeConfig | None = None,
    attn_implementation: str | None = None,
    warm: Iterable[str] = (),
    warm_chats: Iterable[WarmRequest] = (),
    startup: Startup | None = None,
    tracer_provider: Any = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT, and then finish the requests that were taken.

    Args:
        model: A causal language model in eval mode.
        tokenizer: The model's tokenizer.
        settings: The settings of the server.
        kept: The settings of the store, and of how its K/V is reused.
        draft: A smaller model or heads of `load_assistant`, or a `lookup_assistant`; None for no drafts.
        draft_trees: The size of its trees of drafts; None for the default.
        attn_implementation: The attention of the model; None for what `choose_attention` chooses.
        warm: Texts that prompts begin with; they are computed for each API key before the server listens, and pinned
            in host memory.
        warm_chats: The first messages of chats, likewise, as `/v1/warm` takes them.
        startup: Reports stages and what was chosen; None for a new one.
        tracer_provider: OpenTelemetry's, for spans of requests; it is shut down at the end. None for no traces.
    """
    startup = startup or Startup()
    with startup.stage("probing the model"):
        reason = choose_attention(model, attn_implementation)
        engine = _engine(model, tokenizer, settings, kept, draft, draft_trees)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Uvicorn answers all first, and then raises it again; what is kept is still to be written.
            signal.signal(number, _end)
        # A terminal that closes tells the server to end, unless `nohup` keeps that from it.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        salts = [prompt_salt(settings.salt, key) for key in settings.api_keys or (None,)]
        in_tiers = InTiers.of(model, engine.store, kept.live_config, salts)
        if (warning := unfound(model, engine.store, kept.live_config, salts, in_tiers)) is not None:
            _log.warning("%s", warning)
        if (tools := ToolSupport.of(tokenizer)).unknown:
            _log.warning("Requests with tools are %s", tools.told)
        app = front(engine, settings, tracer_provider)
        if starts := list(_starts(app.state.context, warm, warm_chats)):
            _warm_all(engine, starts, salts, startup)
        drafts = _kind_of_drafts(draft, draft_trees)
        chosen = Chosen.of(engine, settings, kept, attention_reason=reason, in_tiers=in_tiers, drafts=drafts)
        FrontServer(app, engine, settings, partial(startup.ended, chosen)).run()
    finally:
        if tracer_provider is not None:
            tracer_provider.shutdown()
        engine.close()
        engine.close_store()
        MemoryPlans().release()


def start_engine(
    model: PreTrainedModel,
    tokenizer: Any,
    settings: ServerSettings,
    kept: EngineSettings,
    *,
    draft: PreTrainedModel | None = None,
    draft_trees: DraftTreeConfig | None = None,
    attn_implementation: str | None = None,
) -> ModelEngine:
    """Make the engine of a server and its store, from arguments of `serve`. The caller closes both."""
    choose_attention(model, attn_implementation)
    return _engine(model, tokenizer, settings, kept, draft, draft_trees)


def front(engine: ModelEngine, settings: ServerSettings, tracer_provider: Any = None) -> FastAPI:
    """Make the app of an engine."""
    model, tokenizer = engine.model, engine.tokenizer
    return make_app(
        engine,
        tokenizer,
        settings,
        ends=_ends(model, tokenizer),
        tracer_provider=tracer_provider,
        sampling=SamplingDefaults.of(model.generation_config),
    )


def _engine(
    model: PreTrainedModel,
    tokenizer: Any,
    settings: ServerSettings,
    kept: EngineSettings,
    draft: PreTrainedModel | None,
    draft_trees: DraftTreeConfig | None,
) -> ModelEngine:
    store = kept.store(model, tokenizer)
    limits = shared(EngineLimits, settings)
    limits["max_live_tokens"] = _live_tokens(model, draft, store, settings)
    limits["max_client_share"] = _CLIENT_SHARE if len(settings.api_keys) > 1 else 1.0
    return ModelEngine(
        model,
        tokenizer,
        store=store,
        policy=kept.policy(),
        live_quant=kept.live_config,
        draft=draft,
        draft_trees=draft_trees,
        clients=[b"", *(key.encode() for key in (*settings.api_keys, *settings.operator_keys))],
        **limits,
    )


def _kind_of_drafts(draft: Any, trees: DraftTreeConfig | None) -> str | None:
    """What operators are told of a draft: its heads, or the policy by which a model drafts."""
    if isinstance(draft, LookupAssistant):
        return "text that repeats"
    if Heads.known(draft) is not None:
        return type(draft).__name__
    return None if draft is None else (trees or DraftTreeConfig()).policy


def _end(number: int, frame: object) -> None:
    raise SystemExit(0)


def _live_tokens(
    model: PreTrainedModel, draft: PreTrainedModel | None, store: ChunkStore, settings: ServerSettings
) -> int | None:
    if settings.max_live_tokens is None and settings.safety_margin is None:
        return None
    reserved = store.max_bytes - int(store.stats()["bytes"])
    rows = settings.max_batch_size * (2 if len(settings.api_keys) > 1 else 1)  # as clients without a place get one
    draft = draft if not isinstance(draft, LookupAssistant) else None  # which keeps no K/V
    plans = MemoryPlans()
    with plans.locked() as promised:
        tokens, margin = settings.max_live_tokens, settings.safety_margin
        if tokens is None and margin is not None:
            fit = {"rows": rows, "reserved": reserved, "promised": promised}
            tokens = tokens_that_fit(model, draft, safety_margin=margin, **fit)
        if promised:
            _log.info("other servers on this machine may come to use %.1f GiB more", promised / 2**30)
        live = 0
        if tokens is not None and input_device(model).type == "cpu":
            positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
            longest = settings.max_model_len or positions or tokens
            live = live_token_bytes(model, draft) * min(tokens, rows * longest)
        plans.claim(reserved + live)
    return tokens


def _starts(context: RouteContext, texts: Iterable[str], chats: Iterable[WarmRequest]) -> Iterator[list[int]]:
    """Ids of what prompts begin with; says in the log where chats cannot begin so, or not always."""
    template = ChatTemplate(context.tokenizer)
    found = [Start(ids, template.why_never(ids)) for ids in map(context.tokenizer.encode, texts)]
    for chat in chats:
        messages, tools = context.told(chat.messages or (), chat.tools or ())
        found.append(context.encoder.start_of(messages, tools, (b"", b""), chat.rendering))
    for number, (ids, reason) in enumerate(found, 1):
        if (told := why_not_stored(len(ids)) or reason) is not None:
            _log.warning("warm start %d of %d: %s", number, len(found), told)
        yield [int(token) for token in ids]


def _warm_all(engine: ModelEngine, texts: Sequence[list[int]], salts: Sequence[bytes], startup: Startup) -> None:
    tokens = len(salts) * sum(map(len, texts))
    with startup.stage(f"warming {tokens:,} tokens"), startup.progress(tokens) as advance:
        for ids in texts:
            _warm(engine, ids, salts, advance)


def _warm(
    engine: ModelEngine,
    ids: Sequence[int],
    salts: Sequence[bytes],
    advance: Callable[[int], object] = lambda tokens: None,
) -> None:
    for salt in salts:
        events: queue.Queue[JobEvent] = queue.Queue()
        job = Job(ids=ids, options=SamplingOptions(max_tokens=0), salt=salt, keep=(Keep(),))
        event, task, told = None, engine.submit(job, events.put), 0
        while not isinstance(event, Finished):
            with suppress(queue.Empty):
                event = events.get(timeout=_SHOWN_EVERY_S)
            done = len(ids) if isinstance(event, Finished) else task.done
            advance(done - told)
            told = done
        if event.reason == "error":
            raise ValueError(f"A text of {len(ids)} tokens could not be warmed: {event.error}. Warm less.")
        if not event.pinned:
            raise ValueError(
                f"A text of {len(ids)} tokens must have room in host memory beside what was warmed before, but has "
                "not. Warm less, or raise `--max-cache-bytes`."
            )


def _ends(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    told = getattr(model.generation_config, "eos_token_id", None)
    ends = set(told) if isinstance(told, list | tuple) else {told}
    return {int(token) for token in (*ends, tokenizer.eos_token_id) if token is not None}
