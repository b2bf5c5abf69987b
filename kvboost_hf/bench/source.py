"""Loads the model of a run, its draft and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, EMBEDDED_MODEL_DIR
from kvboost_hf.config import StreamingConfig
from kvboost_hf.engine.load import naming
from kvboost_hf.offload.build import stream_layers
from kvboost_hf.offload.load import load_streamed

_HEAD_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Loads a model and its tokenizer, here and in other processes.

    Args:
        name: A hub name or a folder; None for the embedded model, or a random one.
        random: Layers and width of a Llama with random weights, whose tokenizer is that of the embedded model.
        draft: A hub name or a folder of a draft model; None for the embedded draft, if its tokenizer fits.
        device: Where the model runs.
        dtype: `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`.

    Raises:
        ValueError: for a random model with a name, or a width that is not a multiple of 64.

    Example:
        >>> ModelSource(random=(2, 128)).shown
        'random Llama, 2 layers of 128'
    """

    name: str | None = None
    random: tuple[int, int] | None = None
    draft: str | None = None
    device: str = "cpu"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.random is None:
            return
        if self.name is not None:
            raise ValueError(f"`random` must be None for a model with a name, got {self.random}. Pass one of the two.")
        layers, width = self.random
        if layers < 1 or width < 1 or width % _HEAD_DIM:
            raise ValueError(
                f"`random` must be layers and a width that is a multiple of {_HEAD_DIM}, got {self.random}."
            )

    @property
    def shown(self) -> str:
        """The name to show."""
        if self.random is not None:
            return "random Llama, {} layers of {}".format(*self.random)
        return self.name or f"embedded {EMBEDDED_MODEL_DIR.name}"

    @property
    def draft_name(self) -> str | None:
        """The draft model to load; None for none."""
        return self.draft or (str(EMBEDDED_DRAFT_DIR) if self.name is None else None)

    def tokenizer(self) -> Any:
        """The tokenizer."""
        with naming(self.name or EMBEDDED_MODEL_DIR):
            return AutoTokenizer.from_pretrained(self.name or EMBEDDED_MODEL_DIR)

    def load(self, attention: str | None = None) -> PreTrainedModel:
        """The model in eval mode, on its device.

        Args:
            attention: Its attention implementation; None for the default one.
        """
        if self.random is not None:
            return self._random(attention, self.device)
        name = self.name or EMBEDDED_MODEL_DIR
        with naming(name, (ImportError, OSError)):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=self.dtype, attn_implementation=attention)
        return self._placed(model)

    def load_draft(self, target: PreTrainedModel) -> PreTrainedModel:
        """A draft model for `target`; there must be one."""
        assert self.draft_name is not None
        return self._placed(AutoModelForCausalLM.from_pretrained(self.draft_name, dtype=target.dtype))

    def load_streamed(self, folder: Path, attention: str | None = None) -> PreTrainedModel:
        """The model with all its layers streamed; where the device has no memory of its own, from files.

        Args:
            folder: For these files.
            attention: See `load`.
        """
        on_host = torch.device(self.device).type != "cuda"
        config = StreamingConfig(residency_mode="full_stream", disk_folder=str(folder) if on_host else None)
        if self.random is not None:
            return stream_layers(self._random(attention, "cpu"), config, device=self.device)
        name = self.name or str(EMBEDDED_MODEL_DIR)
        kwargs: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": attention}
        return load_streamed(name, config, device=self.device, **kwargs)

    def _random(self, attention: str | None, device: str) -> PreTrainedModel:
        assert self.random is not None
        layers, width = self.random
        config = LlamaConfig(
            vocab_size=len(self.tokenizer()),
            hidden_size=width,
            intermediate_size=8 * width // 3 // 16 * 16,
            num_hidden_layers=layers,
            num_attention_heads=width // _HEAD_DIM,
            max_position_embeddings=16_384,
            eos_token_id=None,  # all answers are as long as they may be
            bos_token_id=0,
            pad_token_id=0,
        )
        dtype = torch.float32 if self.dtype == "auto" else getattr(torch, self.dtype)
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            from_config: Any = AutoModelForCausalLM.from_config
            made: PreTrainedModel = from_config(config, dtype=dtype, attn_implementation=attention).train(False)
        return made

    def _placed(self, model: Any) -> PreTrainedModel:
        placed: PreTrainedModel = model.to(self.device).train(False)
        return placed
