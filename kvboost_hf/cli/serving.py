"""`kvboost-hf serve`: answers as the APIs of OpenAI, Anthropic and Ollama do; the server is in `kvboost_hf.server`."""

import argparse
import os
from pathlib import Path
from typing import Any

from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from kvboost_hf.cli.arguments import needs_extra
from kvboost_hf.cli.loading import load_model
from kvboost_hf.cli.server_settings import (
    add_secrets,
    draft_kind,
    draft_trees,
    engine_settings,
    keeps_hidden_states,
    server_settings,
    streaming_config,
    wants_traces,
)


def run_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends the process."""
    with needs_extra("server", "serve"):
        from kvboost_hf.server.http.listen import require_free
        from kvboost_hf.server.requests.texts import read_chat
        from kvboost_hf.server.serve import serve
        from kvboost_hf.server.startup import Startup, write_log

    tracer_provider = None
    if wants_traces(options, os.environ):
        with needs_extra("otel", "serve --otel"):
            from kvboost_hf.server.http.traces import otlp_provider
        tracer_provider = otlp_provider()
    add_secrets(options, os.environ)
    kept, trees = engine_settings(options), draft_trees(options)
    chats = [read_chat(path) for path in options.warm_chat]
    # All of it refuses now, not when the model is there.
    if (tls := server_settings(options, "model", None).tls) is not None:
        tls.context()
    require_free(options.host, options.port)
    write_log(options.log_level)
    startup, name = Startup(), model_name(options.model)
    with startup.stage(f"loading {options.model or name} on {options.device}"):
        model, tokenizer, _ = load_model(options, streaming_config(options))
        draft = load_draft(options, model)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    serve(
        model,
        tokenizer,
        server_settings(options, name, positions),
        kept,
        draft=draft,
        draft_trees=trees,
        attn_implementation=options.attn_implementation,
        warm=options.warm,
        warm_chats=chats,
        startup=startup,
        tracer_provider=tracer_provider,
    )
    return 0


def load_draft(options: argparse.Namespace, model: Any) -> Any:
    """What drafts for `model`, or `ValueError` if that does not fit it; None for no drafts."""
    if draft_trees(options) is None:
        return None
    kind, name = draft_kind(options)
    if kind == "lookup" or (kind == "auto" and not keeps_hidden_states(options)):
        from kvboost_hf.assisted.lookup import lookup_assistant

        return lookup_assistant(model)
    if kind in ("auto", "mtp", "heads"):
        from kvboost_hf.assisted.heads import load_own_heads
        from kvboost_hf.assisted.load import load_assistant

        if kind != "mtp":
            return load_assistant(model) if kind == "auto" else load_assistant(name, target=model)
        if isinstance(found := load_own_heads(model), str):
            raise ValueError(f"`--speculative mtp` needs a model with such layers: {found}. Pass `auto` or `lookup`.")
        return found
    from transformers import AutoModelForCausalLM

    from kvboost_hf.compat import reads_shared_kv

    draft = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).to(options.device).eval()
    if reads_shared_kv(draft.config):
        from kvboost_hf.assisted.load import load_assistant

        return load_assistant(draft, target=model)
    return draft


def model_name(model: str | None) -> str:
    """The name by which clients ask for a model: that of the hub, or the last part of its folder."""
    folder = Path(model or EMBEDDED_MODEL_DIR).expanduser()
    return folder.resolve().name if model is None or folder.is_dir() else model
