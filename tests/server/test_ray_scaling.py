"""Replicas that come and go behind Ray Serve: nobody's request fails, and what they held is found again."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.internals.engine import EngineSettings
from tests.server.ray_cluster import BOSS, KEY, Clients, asked, load, processes, settings, started, until

ray = pytest.importorskip("ray", reason="`make clients` runs it")
serve = pytest.importorskip("ray.serve", reason="`make clients` runs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
NAMES = [f"city{number}" for number in range(12)]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with started(cpus=4):
        yield


def run(chosen: Any, kept: EngineSettings, **more: Any) -> str:
    from kvboost_hf.server.ray_app import build

    serve.run(build(load, chosen, kept, **more), route_prefix=None)
    return f"http://127.0.0.1:{chosen.port}"


def test_load_brings_replicas_and_its_end_takes_them_away(tmp_path: Path) -> None:
    """What those that went had computed, the one that is left finds in the tier that all share."""
    from ray.serve.config import AutoscalingConfig

    # With the default of `target_ongoing_requests`, two: so many run at once in a replica.
    scaled = AutoscalingConfig(
        min_replicas=1, max_replicas=3, upscale_delay_s=0.5, downscale_delay_s=3, look_back_period_s=2
    )
    at = run(settings(), EngineSettings(chunk_size=16, tiers=[f"disk:{tmp_path / 'tier'}:1GB"]), replicas=scaled)
    with httpx.Client(base_url=at, headers=KEY, timeout=60) as http:
        assert len(processes()) == 1
        with Clients(at, NAMES, 9, max_tokens=24) as clients:
            until(lambda: len(processes()) == 3, 150, "no replicas came")
            seen: list[Any] = []

            def all_were_asked() -> bool:
                seen[:] = _stats(http)
                return len(seen) == 3 and all(each["prompt_tokens"] for each in seen)

            until(all_were_asked, 150, "the new replicas were not asked")
            assert sum(each["cached_tokens"] for each in seen) > 0
        assert clients.failed == 0, clients.statuses
        with Clients(at, NAMES, 1, pause_s=0.2) as few:  # requests go on while replicas end
            until(lambda: len(processes()) == 1, 120, "the replicas stayed")
        assert few.failed == 0, few.statuses
        assert sum(few.statuses.values()) > 20
        (left,) = _stats(http)
        found = [asked(http, name) for name in NAMES]
        assert all(cached > prompt - 17 for prompt, cached in found), (found, left["cached_tokens_by_tier"])
    serve.delete("default")


def _stats(http: httpx.Client) -> list[Any]:
    told = http.get("/v1/stats", headers=BOSS)
    return list(told.json()["replicas"].values()) if told.status_code == 200 else []


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_new_deployment_has_what_the_old_one_held(tmp_path: Path, handed_over: bool) -> None:
    """In a folder that is written when a replica ends; without one all is lost, so that this could fail."""
    chosen = settings()
    kept = EngineSettings(chunk_size=16, tiers=[f"handover:{tmp_path / 'tier'}:1GB"] if handed_over else ["ram:64MB"])
    at = run(chosen, kept)
    before, fronts = processes(), processes("Front")
    with httpx.Client(base_url=at, headers=KEY, timeout=60) as http:
        for _ in range(2):
            found = [asked(http, name) for name in NAMES]
        assert all(cached > prompt - 17 for prompt, cached in found)
        dropped = NAMES[:2]
        for name in dropped:
            assert http.delete(f"/v1/kv/sessions/{name}").status_code == 200
    with Clients(at, ["another", "and another"], 2, pause_s=0.05) as clients:
        run(chosen, kept)
        until(lambda: not processes().keys() & before.keys(), 60, "old replicas are left")
    assert clients.failed == 0, clients.statuses
    assert sum(clients.statuses.values()) > 20
    assert processes("Front").keys() == fronts.keys()  # the settings are the same
    with httpx.Client(base_url=at, headers=KEY, timeout=60) as http:
        found = [asked(http, name) for name in NAMES]
    assert [cached for _, cached in found[:2]] == [0, 0]
    assert all((cached > prompt - 17) == handed_over for prompt, cached in found[2:])
    assert handed_over or not any(cached for _, cached in found)
    serve.delete("default")


def test_fronts_with_new_settings_take_turns() -> None:
    """There is always one that listens."""
    chosen, kept = settings(), EngineSettings(chunk_size=16)
    at = run(chosen, kept, replicas=1, fronts=2)
    before = processes("Front")
    with Clients(at, ["one", "two"], 2, pause_s=0.02) as clients:
        time.sleep(1)
        run(settings(port=chosen.port, max_body_bytes=4096), kept, replicas=1, fronts=2)
        until(lambda: not processes("Front").keys() & before.keys(), 60, "old fronts are left")
    assert len(processes("Front")) == 2
    # Who is in the queue of a socket that is closed is turned away, by the system.
    assert clients.failed <= 2, clients.statuses
    assert clients.statuses["200"] > 20
    assert httpx.post(f"{at}/v1/completions", content=b" " * 5000, headers=KEY).status_code == 413
    serve.delete("default")


def test_a_file_of_yaml_makes_an_application(tmp_path: Path) -> None:
    """As `serve deploy` and KubeRay have it: Ray checks the file, and calls the builder with its `args`."""
    from ray.serve.schema import ServeDeploySchema

    from kvboost_hf.server.ray_app import app_from

    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o600)
    port = settings().port
    text = f"""
    proxy_location: Disabled
    applications:
      - name: default
        route_prefix: null
        import_path: kvboost_hf.server.ray_app:app_from
        args:
          model: embedded
          api_keys_file: {keys}
          server: {{model_name: reader, port: {port}, drain_s: 5}}
          kept: {{chunk_size: 16, tiers: ["ram:64MB"]}}
          replicas: {{min_replicas: 1, max_replicas: 2}}
    """
    found = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = found.applications
    assert application.import_path.endswith(app_from.__name__)
    serve.run(app_from(application.args), route_prefix=None)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=KEY, timeout=60) as http:
        asked(http, "Oslo")
        prompt, cached = asked(http, "Oslo")
        assert cached > prompt - 17
        assert http.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 401
    with pytest.raises(ValueError, match="Did you mean `model`"):
        app_from({"modell": "embedded"})
    serve.delete("default")
