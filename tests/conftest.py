"""Tiny models from configurations, and a counter of what really went through a model."""

import gc
import hashlib
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from packaging.version import Version

# Kernels in Triton run in its interpreter, which is chosen where they are imported, unless there is a GPU to run them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.utils import output_capturing
from transformers.utils.import_utils import is_kernels_available

from tests.internals.cache import ComputePace
from tests.servers import BINARY, Server


def pytest_collection(session: pytest.Session) -> None:
    """Let each process import its part of the tests first: pytest keeps the bytecode, so that no other makes it."""
    if worker := getattr(session.config, "workerinput", None):
        named = [Path(name.partition("::")[0]) for name in session.config.args]
        paths = sorted(path for name in named for path in name.absolute().rglob("test_*.py"))
        for path in paths[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # the collection says so
                import_module(".".join(path.relative_to(session.config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what every commit need not be tested with: tests that take long, and most cases of tests with many."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.nightly)
    for each in cases.values():
        for item in _left_for_the_night(each):
            if not item.get_closest_marker("daily"):
                item.add_marker(pytest.mark.nightly)


def _left_for_the_night(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """All but half the square root of the cases of a test, at least one: a hash of their names decides which ones."""
    ordered = sorted(cases, key=lambda item: hashlib.sha1(item.nodeid.encode()).digest())
    return ordered[max(1, round(math.sqrt(len(cases)) / 2)) :]


def pytest_collection_finish() -> None:
    """Leave the million objects of libraries and tests out of garbage collections, which take 0.7 s with them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Have them collected as Python ends, before libraries say that they have leaked."""
    gc.unfreeze()


# Where transformers takes the release of `kernels`, plain models, too, hold a local function of it: for positions.
pickles_models = pytest.mark.skipif(
    is_kernels_available() and Version(version("kernels")) < Version("0.18"),
    reason="with a release of `kernels` that it uses, plain transformers cannot pickle its models either",
)

# Whether `output_hidden_states` takes the numbers of layers, as transformers 5.24 does, and 5.17 does not.
CHOOSES = hasattr(output_capturing, "selected_hidden_states")
# Releases of transformers that have not all that these tests are about.
collect_ignore = [] if CHOOSES else ["parity/test_own_heads.py", "parity/test_shared_kv.py"]
VOCAB = 200
PAD, BOS, EOS = 0, 1, 199

# Weights ten times larger than usual: with the usual ones a tiny model says the same whatever its K/V.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_ABSOLUTE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_COMMON)),
    "deep_llama": lambda: LlamaForCausalLM(LlamaConfig(**{**_COMMON, "num_hidden_layers": 8})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=16, **_COMMON)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**{**_COMMON, "num_key_value_heads": 4})),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_positions=1024, **_ABSOLUTE)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=64, **_ABSOLUTE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=24, **_COMMON)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(sliding_window=24, head_dim=16, **_COMMON)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **_COMMON,
            head_dim=16,
            sliding_window=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**_COMMON, "num_key_value_heads": 4},
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        )
    ),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **{**_COMMON, "num_hidden_layers": 3},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            head_dim=16,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(
            **_COMMON,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=16,
        )
    ),
}
WINDOWED = ["mistral", "gemma2"]
STATEFUL = ["qwen3_next", "falcon_h1"]
FULL_ATTENTION = ["llama", "qwen2", "qwen3", "phi", "gpt2", "bloom", "deepseek_v3"]


def make_model(name: str = "llama", seed: int = 0) -> Any:
    """A tiny random `PreTrainedModel` in eval mode; its class has no `generate` that types know."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _MAKERS[name]().eval()


def random_ids(n: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Ids [batch, n] without special tokens."""
    return torch.randint(2, EOS, (batch, n), generator=torch.Generator().manual_seed(seed))


def left_pad(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows [1, n] of different lengths as one batch with an attention mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row[0]
        mask[i, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def as_inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tokenizer gives for one row without padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Work:
    """Counts tokens and calls that reach the embeddings of a model, in this thread, without touching the model.

    It stands in place of the one operator that looks rows up: a mode would see all functions of PyTorch, and makes a
    tiny model half as slow again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._weight = next(model.get_input_embeddings().parameters())
        self.tokens = 0
        self.calls = 0

    def __enter__(self) -> Self:
        look_up, thread = torch.embedding, threading.get_ident()

        def embedding(weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if weight is self._weight and threading.get_ident() == thread:
                self.tokens += indices.numel()
                self.calls += 1
            return look_up(weight, indices, *args, **kwargs)

        self._look_up, torch.embedding = look_up, embedding
        return self

    def __exit__(self, *raised: object) -> None:
        torch.embedding = self._look_up


def counted(model: PreTrainedModel) -> Work:
    """Count what is really computed inside a `with` block, whatever a report says."""
    return Work(model)


@pytest.fixture
def llama() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """The address of a disk tier that is empty."""
    return f"disk:{tmp_path / 'tier'}:1GB"


@pytest.fixture
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """`add_adapter()` and its kin take the installed PEFT: transformers 5.24 asks for 0.22, which is not released."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)


@pytest.fixture
def loading_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than anything is read; what is worth loading has tests of its own."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Valkey or Redis server for all tests that leave it as it was."""
    if BINARY is None:
        pytest.skip("neither valkey-server nor redis-server is on the PATH")
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()
