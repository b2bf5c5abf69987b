"""The arguments of a cluster in a file of YAML: what is wrong is named, with what to write in its place."""

from pathlib import Path
from typing import Any

import pytest

from tests.internals.server import ClusterArgs, ServerSettings

pytestmark = pytest.mark.daily


def test_all_that_there_is(tmp_path: Path) -> None:
    for name, text in (("keys", "one\ntwo\n"), ("boss", "three\n"), ("tier", "k" * 32)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    found = ClusterArgs.of(
        {
            "model": "embedded",
            "server": {"model_name": "reader", "port": 9000, "drain_s": 5, "model_aliases": ["gpt-*"], "tls": None},
            "kept": {"chunk_size": 16, "tiers": ["ram:1GB"], "max_cache_bytes": None},
            "api_keys_file": str(tmp_path / "keys"),
            "operator_keys_file": str(tmp_path / "boss"),
            "tier_key_file": str(tmp_path / "tier"),
            "replicas": {"max_replicas": 4},
            "fronts": 2,
        }
    )
    keys: Any = {"api_keys": ("one", "two"), "operator_keys": ("three",)}
    assert found.settings == ServerSettings(
        model_name="reader", port=9000, drain_s=5, model_aliases=("gpt-*",), **keys
    )
    assert (found.kept.chunk_size, found.kept.tiers, found.kept.tier_key) == (16, ("ram:1GB",), b"k" * 32)
    assert found.more == {"replicas": {"max_replicas": 4}, "fronts": 2}
    assert found.load()[0].config.model_type == "llama"


def test_the_name_is_that_of_the_model(tmp_path: Path) -> None:
    assert ClusterArgs.of({"model": "org/name"}).settings.model_name == "org/name"
    assert ClusterArgs.of({"model": str(tmp_path)}).settings.model_name == tmp_path.name


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": None}, "`args` must have a `model`"),
        ({"modle": "a"}, "Did you mean `model`"),
        ({"server": {"prot": 1}}, "`server` must have no `prot`: .* Did you mean `port`"),
        ({"server": [1]}, "`server` must be a mapping"),
        ({"server": {"port": "80"}}, "`server.port` must be a whole number, got '80'"),
        ({"server": {"port": 8.5}}, "`server.port` must be a whole number"),
        ({"server": {"port": -1}}, "`port` must be"),
        ({"server": {"drain_s": True}}, "`server.drain_s` must be a number, got True"),
        ({"server": {"model_aliases": "a"}}, "`server.model_aliases` must be a list, got 'a'"),
        ({"server": {"embeddings": 1}}, "`server.embeddings` must be true or false"),
        ({"server": {"max_model_len": "long"}}, "`max_model_len` must be an int, got 'long'"),
        ({"server": {"api_keys": ["secret"]}}, "must not have `api_keys`: .*`api_keys_file`"),
        ({"server": {"tls": {"certfile": "a", "key": "b"}}}, "`server.tls` must have no `key`.*keyfile"),
        ({"kept": {"tier_key": "secret"}}, "must not have `tier_key`"),
        ({"kept": {"tiers": ["tape:/kv"]}}, "no address of a tier"),
        ({"api_keys_file": "/nowhere/keys"}, "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        ClusterArgs.of({"model": "embedded", **change})
    assert "secret" not in str(caught.value)
