"""A server whose engine is scripted, over a folder of stored K/V, which a later server finds again."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvboost_hf import ChunkStore
from tests.agents.clients import MODEL
from tests.agents.scripted import ScriptedEngine, Step
from tests.internals.server import ModelEngine, ServerSettings, make_app
from tests.server.conftest import listening

CONTEXT = 65_536
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
A call is a JSON object within tags:
<tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer_with_tools() -> Any:
    """The tokenizer of SmolLM2, whose own chat template has no place for tools."""
    from recipes.real_model import load

    found = load()[1]
    found.chat_template = TEMPLATE
    return found


def small_model(tokenizer: Any) -> LlamaForCausalLM:
    """A model with weights of no meaning, which computes 20,000 tokens in seconds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class Service:
    """A server under way.

    Attributes:
        url: The address of the service.
        engine: What has answered.
        refused: Each request that was answered with an error: path, status and body.
        ignored: What the server has named as ignored.
    """

    url: str
    engine: ScriptedEngine
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)


@contextmanager
def serving(model: Any, tokenizer: Any, folder: Path, scripts: dict[str, list[Step]]) -> Iterator[Service]:
    """Serve a model whose answers are scripted; K/V is kept in a folder."""
    store = ChunkStore(model, tiers=[f"disk:{folder}"])
    inner = ModelEngine(model, tokenizer, store=store, prefill_chunk_size=1024)
    engine = ScriptedEngine(inner, tokenizer, scripts)
    settings = ServerSettings(model_name=MODEL, model_aliases=("claude-*",))
    service = Service("", engine)
    app = make_app(engine, tokenizer, settings)
    try:
        with listening(_Watched(app, service)) as at:
            service.url = at.url
            yield service
    finally:
        inner.close()
        store.close()


class _Watched:
    """An ASGI app that notes answers with an error."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        status, body = 0, b""

        async def noted(message: Any) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message["headers"])
                named = headers.get(b"x-kvboost-ignored", b"").decode()
                self._service.ignored.update(name.strip() for name in named.split(",") if name.strip())
            elif message["type"] == "http.response.body" and status >= 400:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    self._service.refused.append((scope["path"], status, body.decode()))
            await send(message)

        await self._app(scope, receive, noted)
