"""Two replicas of the embedded model behind Ray Serve, and a folder that they share."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvboost_hf.assets import load_embedded
from tests.internals.engine import EngineSettings
from tests.internals.server import Place, ServerSettings, prompt_keys
from tests.servers import free_port

ray = pytest.importorskip("ray", reason="`make clients` runs it")
serve = pytest.importorskip("ray.serve", reason="`make clients` runs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


KEY, OTHER, BOSS = ({"authorization": f"Bearer {key}"} for key in ("key", "other", "boss"))


def load() -> tuple[Any, Any]:
    """The embedded model, of which loading any K/V pays, however busy the machine is."""
    from tests.internals.cache import ComputePace

    ComputePace.seconds_per_token = lambda self, model: 1.0
    return load_embedded()


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from kvboost_hf.server.ray_app import build

    port = free_port()
    folder = tmp_path_factory.mktemp("tier")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    serve.start(proxy_location="Disabled")
    kept = EngineSettings(chunk_size=16, tiers=["ram:64MB", f"disk:{folder}:1GB"])
    settings = ServerSettings(
        model_name="reader",
        max_batch_size=2,
        port=port,
        api_keys=("key", "other"),
        operator_keys=("boss",),
        body_timeout_s=3,
        header_timeout_s=3,
    )
    serve.run(build(load, settings, kept), route_prefix=None)
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


def test_what_is_deleted_no_replica_serves(at: str) -> None:
    """Of ten sessions that both replicas have served."""
    with httpx.Client(base_url=at, headers=KEY, timeout=60) as http:

        def cached(name: str) -> int:
            prompt = f"{name}: " + f"Anna lives in {name}. She plays the piano. " * 8
            body = {"model": "reader", "prompt": prompt, "max_tokens": 1, "prompt_cache_key": name}
            told = http.post("/v1/completions", json=body)
            assert told.status_code == 200, told.text
            return int(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        names = [f"s{number}" for number in range(10)]
        for name in names:
            cached(name)
            assert cached(name) > 60
        assert {*names} <= {each["id"] for each in http.get("/v1/kv/sessions").json()["data"]}
        assert http.get("/v1/kv/sessions/s0", headers=OTHER).status_code == 404
        for name in names:
            assert http.delete(f"/v1/kv/sessions/{name}").json()["deleted"]
        assert [cached(name) for name in names] == [0] * 10


def test_replicas_publish_what_they_hold(at: str) -> None:
    """All of it at first, and then what has changed; what is deleted is withdrawn."""
    handle = serve.get_deployment_handle("Replica", "default")

    def news(places: Any) -> dict[str, Any]:
        return {each.replica: each for each in handle.broadcast("news", places).results(timeout_s=30)}

    before = news({})
    prompt = "Published: " + "Anna lives in Rome. She plays the violin. " * 12
    keys = prompt_keys(json.dumps({"prompt": prompt}).encode(), "key")
    body = {"model": "reader", "prompt": prompt, "max_tokens": 1, "prompt_cache_key": "published"}
    with httpx.Client(base_url=at, headers=KEY, timeout=60) as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        places = {name: Place(each.epoch, each.stop) for name, each in before.items()}
        stored = news(places)
        assert len(stored) == 2
        assert [each.keys for each in stored.values() if each.keys] == [keys]
        assert all(each.start == before[name].stop for name, each in stored.items())
        places = {name: Place(each.epoch, each.stop) for name, each in stored.items()}
        assert http.delete("/v1/kv/sessions/published").json()["deleted"]
        gone = [each for each in news(places).values() if each.keys]
        assert [(set(each.keys), set(each.tiers)) for each in gone] == [(set(keys), {0})]


def test_bodies_with_a_wrong_key_keep_nobody_waiting(at: str) -> None:
    """Thirty of 15 MB: `/health` is answered in time, and each is refused before its body is read."""
    body, statuses = b"{" + b" " * (15 * 2**20), list[int]()

    def send() -> None:
        try:
            url, wrong = f"{at}/v1/chat/completions", {"authorization": "Bearer wrong"}
            statuses.append(httpx.post(url, content=body, headers=wrong, timeout=60).status_code)
        except httpx.TransportError:
            statuses.append(0)  # closed while it was still sending

    senders = [threading.Thread(target=send) for _ in range(30)]
    for sender in senders:
        sender.start()
    slowest = 0.0
    while any(sender.is_alive() for sender in senders):
        begin = time.monotonic()
        assert httpx.get(f"{at}/health", timeout=20).status_code == 200
        slowest = max(slowest, time.monotonic() - begin)
    assert set(statuses) <= {401, 0}
    assert 401 in statuses
    assert slowest < 5, slowest


def test_headers_and_bodies_have_deadlines(at: str) -> None:
    port = int(at.rpartition(":")[2])
    whole = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\nContent-Length: 99\r\n\r\n{"
    )
    for sent, answer in ((whole[:40], b""), (whole, b"HTTP/1.1 408")):
        with socket.create_connection(("127.0.0.1", port), 30) as one:
            begin = time.monotonic()
            one.sendall(sent)
            assert one.recv(12) == answer
            assert time.monotonic() - begin < 8


def test_requests_have_lines_of_json_in_the_logs_of_replicas(at: str) -> None:
    """With the id that the client knows, and the name of the replica."""
    body = {"model": "reader", "prompt": "Who?", "max_tokens": 1}
    told = httpx.post(f"{at}/v1/completions", json=body, headers=KEY | {"x-request-id": "find-me"}, timeout=60)
    assert told.headers["x-request-id"] == "find-me"
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    end = time.monotonic() + 20
    lines: list[dict[str, Any]] = []
    while len(lines) < 2 and time.monotonic() < end:
        texts = (path.read_text("utf-8", "replace") for path in logs.rglob("*") if path.is_file())
        found = [line for text in texts for line in text.splitlines() if '"find-me"' in line and line.startswith("{")]
        lines = [json.loads(line) for line in found]
        time.sleep(0.2)
    assert {"front", "replica"} <= {name for line in lines for name in line}
    assert all("key" not in line for line in lines)


def test_more_replicas_than_fit_are_refused_at_once(at: str) -> None:
    from kvboost_hf.server.ray_app import build

    kept, settings = EngineSettings(), ServerSettings(model_name="reader")
    with pytest.raises(ValueError, match="9 of them need 9 CPU, of which 5 CPU are lacking"):
        build(load_embedded, settings, kept, replicas=9)
    build(load_embedded, settings, kept, replicas=9, check_resources=False)


def test_what_the_app_refuses_is_refused(at: str) -> None:
    assert httpx.post(f"{at}/v1/chat/completions", content=b"{", headers=KEY).status_code == 400
    assert httpx.get(f"{at}/nowhere", headers=KEY).status_code == 404
    assert (
        httpx.post(f"{at}/v1/completions", content=b" " * (16 * 2**20 + 1), headers=KEY, timeout=60).status_code == 413
    )
    assert httpx.get(f"{at}/health").json() == {"status": "ok"}


def test_prompts_go_where_they_went_and_survive_a_replica(at: str) -> None:
    texts = [f"Document {n}. " + "Anna lives in Oslo. She plays the piano. " * 6 for n in range(6)]
    with openai.OpenAI(base_url=f"{at}/v1", api_key="key", max_retries=8, timeout=60) as client:
        assert len(_replicas()) == 2
        assert all(_ask(client, text, "Where?")[1] < 32 for text in texts)  # what a chat begins with
        for text in texts:
            prompt, cached = _ask(client, text, "What does Anna play?")
            assert cached > prompt // 2

        messages: list[Any] = [{"role": "user", "content": "Where does Anna live? " * 4}]
        stream = client.chat.completions.create(model="reader", messages=messages, max_tokens=4, stream=True)
        assert len(list(stream)) > 2

        stats = httpx.get(f"{at}/v1/stats", headers=BOSS).json()["replicas"]
        assert len(stats) == 2
        assert sum(each["prompt_tokens"] for each in stats.values()) > 0
        page = httpx.get(f"{at}/metrics", headers=BOSS).text
        assert all(f'kvboost_engine{{replica="{name}",figure="running"}}' in page for name in stats)
        ray.kill(_replicas()[0], no_restart=True)
        for text in texts:
            prompt, cached = _ask(client, text, "Who plays?")
            assert cached > prompt // 2, httpx.get(f"{at}/v1/stats", headers=BOSS, timeout=60).text
