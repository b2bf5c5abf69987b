"""What a StreamingConfig takes, and what it refuses with which remedy."""

import re
from typing import Any

import pytest

from kvboost_hf.config import StreamingConfig, parse_size

pytestmark = pytest.mark.daily


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("7.5GiB", 15 * 2**29),
        ("500 MB", 500 * 10**6),
        ("2kib", 2048),
        ("7B", 7),
        ("8G", 8 * 10**9),
        ("1.5g", 15 * 10**8),
        ("512M", 512 * 10**6),
        ("100 k", 10**5),
        ("2T", 2 * 10**12),
        ("8Gi", 2**33),
        *((text, None) for text in ("", "8", "GB", "G", "-8GB", "0GB", "0G", "8XB", "8 G B", "8i", "nanGB")),
    ],
)
def test_sizes_as_text(text: str, nbytes: int | None) -> None:
    assert parse_size(text) == nbytes


def test_budgets_in_bytes() -> None:
    config = StreamingConfig(vram_budget="8GB", host_budget=5, disk_folder="layers", reserved="1GiB")
    assert (config.vram_bytes, config.host_bytes, config.reserved_bytes) == (8 * 10**9, 5, 2**30)
    config = StreamingConfig()
    assert (config.vram_bytes, config.host_bytes, config.reserved_bytes) == (None, None, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"residency_mode": "ffn_only_stream", "keep_first_k": 2, "keep_last_k": 0},
        {"residency_mode": "full_stream", "vram_budget": "8GB"},
        {"disk_folder": "layers"},
        {"n_staging_slots": 3, "max_tokens": 1, "reserved": 0, "quant_kernel": "torch"},
    ],
)
def test_takes(arguments: dict[str, Any]) -> None:
    StreamingConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residency_mode": "auto"}, "`residency_mode` must be one of ('partial_resident', "),
        ({"quant_kernel": "cuda"}, "`quant_kernel` must be one of ('auto', 'triton', 'torch'), got 'cuda'."),
        ({"quant_kernel": "marlin"}, "got 'marlin', which repacks weights when it loads them and cannot read"),
        ({"quant_kernel": "exllama_v2"}, "read streamed ones. Pass 'auto'."),
        ({"n_staging_slots": 1}, "`n_staging_slots` must be 2 or more, got 1."),
        ({"n_staging_slots": 2.0}, "`n_staging_slots` must be an int, got 2.0."),
        ({"max_tokens": 0}, "`max_tokens` must be 1 or more, got 0."),
        ({"prefill_chunk_size": 0}, "`prefill_chunk_size` must be 1 or more, got 0."),
        ({"max_tokens": True}, "`max_tokens` must be an int, got True."),
        ({"keep_first_k": -1}, "`keep_first_k` must be 0 or more, got -1."),
        ({"keep_last_k": "2"}, "`keep_last_k` must be an int, got '2'."),
        ({"vram_budget": 0}, "`vram_budget` must be 1 or more bytes, or text with a unit such as '8GB'"),
        ({"vram_budget": "8"}, "such as '8GB' or '7.5GiB', got '8'."),
        ({"vram_budget": 8e9}, "`vram_budget` must be 1 or more bytes"),
        ({"vram_budget": True}, "got True."),
        ({"host_budget": "much", "disk_folder": "layers"}, "`host_budget` must be 1 or more bytes"),
        ({"reserved": -1}, "`reserved` must be 0 or more bytes"),
        ({"vram_budget": "8GB", "keep_first_k": 0}, "`keep_first_k` must be None with a `vram_budget`"),
        ({"vram_budget": "8GB", "keep_last_k": 4}, "which chooses the layers that stay, got 4. Pass one of the two."),
        ({"residency_mode": "full_stream", "keep_first_k": 1}, "`keep_first_k` must be None with residency_mode"),
        ({"residency_mode": "full_resident", "keep_last_k": 1}, "Pass 'partial_resident' to choose layers."),
        *(({"disk_folder": empty}, "`disk_folder` must name a folder") for empty in ("", " ", 5)),
        ({"host_budget": "8GB"}, "`host_budget` must be None without a `disk_folder`"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        StreamingConfig(**arguments)
