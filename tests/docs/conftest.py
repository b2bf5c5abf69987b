"""A server for the pages and scripts that ask one."""

from collections.abc import Iterator

import pytest

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import ModelEngine, ServerSettings, make_app
from tests.server.conftest import listening


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Of the embedded model, as `kvboost-hf serve` serves it."""
    model, tokenizer = load_embedded()
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16))
    settings = ServerSettings(model_name="reader", default_max_tokens=64)
    with listening(make_app(engine, tokenizer, settings)) as at:
        yield f"{at.url}/v1"
    engine.close()
