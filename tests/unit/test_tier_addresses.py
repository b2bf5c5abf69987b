"""Addresses of tiers, as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.internals.cache import (
    DEFAULT_DISK_BYTES,
    FilesystemTier,
    TierSpec,
    ValkeyTier,
    open_tier,
    open_tiers,
    parse_tier,
    secrets_in,
    without_secrets,
)

pytestmark = pytest.mark.daily


@pytest.mark.parametrize(
    ("text", "kind", "location", "max_bytes"),
    [
        ("ram:4GB", "ram", "", 4 * 10**9),
        ("ram:512mb", "ram", "", 512 * 10**6),
        ("device:1.5GiB", "device", "", 3 * 2**29),
        ("disk:/cache", "disk", "/cache", DEFAULT_DISK_BYTES),
        ("disk:~/.cache/kvboost_hf:50GB", "disk", "~/.cache/kvboost_hf", 50 * 10**9),
        ("disk:relative:1TB", "disk", "relative", 10**12),
        (r"disk:C:\kv:2KiB", "disk", r"C:\kv", 2048),
        (r"disk:C:\kv", "disk", r"C:\kv", DEFAULT_DISK_BYTES),
        ("disk:C:/kv", "disk", "C:/kv", DEFAULT_DISK_BYTES),
        ("disk:/a:b/c:7B", "disk", "/a:b/c", 7),
        ("handover:/cache", "handover", "/cache", DEFAULT_DISK_BYTES),
        ("handover:~/kv:50GB", "handover", "~/kv", 50 * 10**9),
        ("redis://host:6379/0", "valkey", "redis://host:6379/0", None),
        ("rediss://u:p@host", "valkey", "rediss://u:p@host", None),
        ("valkey://host", "valkey", "valkey://host", None),
        ("unix:///run/valkey.sock", "valkey", "unix:///run/valkey.sock", None),
        ("s3://bucket/kv", "filesystem", "s3://bucket/kv", None),
        ("memory://kv", "filesystem", "memory://kv", None),
        # A size may follow any address, and is taken for nothing else.
        ("ram:8G", "ram", "", 8 * 10**9),
        ("disk:/kv:512M", "disk", "/kv", 512 * 10**6),
        ("disk:/kv:8Gi", "disk", "/kv", 2**33),
        ("file:///kv:100KB", "filesystem", "file:///kv", 10**5),
        ("file://kv:1.5GiB", "filesystem", "file://kv", 3 * 2**29),
        ("s3://bucket/kv:1TB", "filesystem", "s3://bucket/kv", 10**12),
        ("s3://bucket:1T", "filesystem", "s3://bucket", 10**12),
        ("memory://kv:1g", "filesystem", "memory://kv", 10**9),
        ("sftp://host:22/kv:5GB", "filesystem", "sftp://host:22/kv", 5 * 10**9),
        ("redis://host:6379/0:2GB", "valkey", "redis://host:6379/0", 2 * 10**9),
        ("redis://u:p@host:6379:2GB", "valkey", "redis://u:p@host:6379", 2 * 10**9),
        ("rediss://host:2GB", "valkey", "rediss://host", 2 * 10**9),
        ("unix:///run/valkey.sock:1G", "valkey", "unix:///run/valkey.sock", 10**9),
        # These only look like one.
        ("redis://host:6379", "valkey", "redis://host:6379", None),
        ("redis://[::1]:6379", "valkey", "redis://[::1]:6379", None),
        ("valkey://host?password=a:12", "valkey", "valkey://host?password=a:12", None),
        ("s3://bucket/run:2026-11-27", "filesystem", "s3://bucket/run:2026-11-27", None),
        ("sftp://host:22/kv", "filesystem", "sftp://host:22/kv", None),
        ("file:///C:/kv", "filesystem", "file:///C:/kv", None),
    ],
)
def test_parses(text, kind, location, max_bytes):
    assert parse_tier(text) == TierSpec(kind, location, max_bytes)


@pytest.mark.parametrize(
    "text",
    [
        *("", "4GB", "ram", "ram:", "ram:4", "ram:50%", "ram:0GB", "ram:-1GB", "ram:4GB:5GB", "ram:infGB", "RAM:4GB"),
        *(
            "disk",
            "disk:",
            "disk:/kv:50XB",
            "disk:/kv:5",
            "disk:/kv:0GB",
            "disk::10GB",
            "tape:/kv",
            "redis://",
            "://host",
            *(
                "file:///kv:100",
                "file:///kv:100XB",
                "file://kv:5",
                "s3://b/kv:0GB",
                "redis://host/0:5",
                "memory://:1GB",
            ),
            *("unix:///a.sock:7", "s3://b/kv:50 zB"),
        ),
    ],
)
def test_refuses_with_the_text_and_an_example(text):
    with pytest.raises(ValueError, match="Examples: 'ram:4GB'") as caught:
        parse_tier(text)
    assert repr(text) in str(caught.value)


@given(st.text())
def test_never_fails_otherwise(text):
    try:
        spec = parse_tier(text)
    except ValueError:
        return
    assert spec.max_bytes is None or spec.max_bytes > 0


@given(st.text("abc/.:\\", min_size=1).filter(lambda path: "//" not in path), st.integers(1, 10**6))
def test_any_path_keeps_its_size(path, size):
    assert parse_tier(f"disk:{path}:{size}MB") == TierSpec("disk", path, size * 10**6)


def test_memory_is_no_place_to_open():
    with pytest.raises(ValueError, match="the store keeps it itself"):
        open_tier(parse_tier("ram:4GB"))


def test_two_tiers_of_one_kind_are_refused_and_closed(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    with pytest.raises(ValueError, match=r"`tiers` must have one tier of each kind at most, got \['disk', 'disk'\]"):
        open_tiers([f"disk:{first}:1MB", f"disk:{second}:1MB"], None)
    open_tiers([f"disk:{first}:1MB"], None).opened[0].close()


@pytest.mark.parametrize(
    ("tiers", "max_bytes", "told"),
    [
        (["ram:1kB", "ram:2kB"], None, r"'ram' at most, got \[1000, 2000\]\."),
        (["ram:1kB"], 5000, r"'ram' at most, got \[5000, 1000\], `max_bytes` being one\."),
        (["device:1kB", "device:2kB"], 5000, r"'device' at most, got \[1000, 2000\]\."),
    ],
)
def test_two_sizes_of_one_memory_are_refused(tiers, max_bytes, told):
    with pytest.raises(ValueError, match=rf"`tiers` must give one size of {told}"):
        open_tiers(tiers, max_bytes)


def test_opens_what_the_address_names():
    opened = open_tier(parse_tier("memory://kv:3MB"))
    assert (type(opened), opened.stats()["max_bytes"]) == (FilesystemTier, 3_000_000)
    for empty in ("file://", "memory://", ""):
        with pytest.raises(ValueError, match="`url` must be a scheme and a place"):
            FilesystemTier(empty)
    pytest.importorskip("valkey")
    limited = open_tier(parse_tier("redis://127.0.0.1:1/0:3MB"))
    assert (limited.location, limited.stats()["max_bytes"]) == ("redis://127.0.0.1:1/0", 3_000_000)
    tier = open_tier(parse_tier("redis://:hush@127.0.0.1:1/0"))  # nobody is there
    assert (type(tier), tier.location) == (ValkeyTier, "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hush@host:6379/0?password=hush", "redis://host:6379/0"),
        ("redis://:hush/@hu:sh@host/0", "redis://host/0"),
        ("redis://:hu?sh@host", "redis://host"),
        ("unix://hush@/run/valkey.sock?password=hush", "unix:///run/valkey.sock"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("file:///home/me@work/kv", "file:///home/me@work/kv"),
    ],
)
def test_passwords_are_not_shown(url, shown):
    assert without_secrets(url) == shown
    assert "hush" not in repr(parse_tier(url))


def test_knows_passwords_as_they_are_written_and_as_they_are_sent():
    assert secrets_in("redis://me:a%2Fb@host/0?password=c") == {"a%2Fb", "a/b", "c"}
