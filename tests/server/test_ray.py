"""Two replicas of the embedded model behind Ray Serve, and a folder that they share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvboost_hf.assets import load_embedded
from tests.internals.engine import EngineSettings
from tests.internals.server import ServerSettings
from tests.servers import free_port

ray = pytest.importorskip("ray", reason="`make clients` runs it")
serve = pytest.importorskip("ray.serve", reason="`make clients` runs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from kvboost_hf.server.ray_app import build

    port = free_port()
    folder = tmp_path_factory.mktemp("tier")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    kept = EngineSettings(chunk_size=16, tiers=["ram:64MB", f"disk:{folder}:1GB"])
    serve.run(build(load_embedded, ServerSettings(model_name="reader", max_batch_size=2), kept))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def _ask(client: openai.OpenAI, system: str, question: str) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were reused."""
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    answer = client.chat.completions.create(model="reader", messages=messages, max_tokens=2, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def _replicas() -> list[Any]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [ray.get_actor(**actor) for actor in actors if "#Replica#" in actor["name"]]


def test_prompts_go_where_they_went_and_survive_a_replica(at: str) -> None:
    texts = [f"Document {n}. " + "Anna lives in Oslo. She plays the piano. " * 6 for n in range(6)]
    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=8, timeout=60) as client:
        assert len(_replicas()) == 2
        assert all(_ask(client, text, "Where?")[1] < 32 for text in texts)  # what a chat begins with
        for text in texts:
            prompt, cached = _ask(client, text, "What does Anna play?")
            assert cached > prompt // 2

        messages: list[Any] = [{"role": "user", "content": "Where does Anna live? " * 4}]
        stream = client.chat.completions.create(model="reader", messages=messages, max_tokens=4, stream=True)
        assert len(list(stream)) > 2

        stats = httpx.get(f"{at}/v1/stats").json()
        assert stats["prompt_tokens"] > 0
        ray.kill(_replicas()[0], no_restart=True)
        for text in texts:
            prompt, cached = _ask(client, text, "Who plays?")
            assert cached > prompt // 2, json.dumps(stats)


def test_what_the_app_refuses_is_refused(at: str) -> None:
    assert httpx.post(f"{at}/v1/chat/completions", content=b"{").status_code == 400
    assert httpx.get(f"{at}/nowhere").status_code == 404
    assert httpx.post(f"{at}/v1/completions", content=b" " * (16 * 2**20 + 1), timeout=60).status_code == 413
    assert httpx.get(f"{at}/health").json() == {"status": "ok"}
