"""Loads the model of a run, its draft and its tokenizer: one model for each attention, shared by the arms that use it.

A model is streamed or not. `ForwardCount` counts the tokens that go through its decoder layers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, EMBEDDED_MODEL_DIR
from kvboost_hf.cache.forward.idle import in_idle_thread
from kvboost_hf.compat import decoder_layers, naming
from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.build import stream_layers
from kvboost_hf.offload.load import load_streamed

_HEAD_DIM = 64


class ForwardCount:
    """Counts tokens that go through a model: the mean over its decoder layers.

    A repair sends fewer tokens through later layers than through the first ones. What is repaired while caches are
    idle belongs to no call, and is not counted.

    Args:
        model: Gets a forward hook on each decoder layer.

    Raises:
        ValueError: the decoder layers cannot be told.
    """

    leaves_kv_alone = True  # so that K/V of the model is good for other processes

    def __init__(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)
        if not layers:
            raise ValueError(
                f"`model` must have decoder layers that can be told, got {type(model).__name__}: none is counted."
            )
        self._rows, self._layers = 0, len(layers)
        for layer in layers:
            layer.register_forward_hook(self._add)

    @property
    def tokens(self) -> int:
        """Tokens counted so far, rounded up."""
        return -(-self._rows // self._layers)

    def _add(self, _layer: torch.nn.Module, _args: Any, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        if in_idle_thread():
            return
        hidden_BTH = out if isinstance(out, torch.Tensor) else out[0]
        self._rows += hidden_BTH.shape[:-1].numel()


class Counted(NamedTuple):
    """A model, and the count of its forwards."""

    model: PreTrainedModel
    forwards: ForwardCount


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """Loads a model and its tokenizer, here and in other processes.

    Raises:
        ValueError: for a random model with a name, or a width that is not a multiple of 64.

    Example:
        >>> ModelOrigin(random=(2, 128)).shown
        'random Llama, 2 layers of 128'
    """

    name: str | None = None  # a hub name or a folder; None for the embedded model, or a random one
    # Layers and width of a Llama with random weights, whose tokenizer is that of the embedded model.
    random: tuple[int, int] | None = None
    # A hub name or a folder of a draft model; None for the embedded draft, if its tokenizer fits.
    draft: str | None = None
    device: str = "cpu"  # where the model runs
    dtype: str = "auto"  # `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`
    # A model and its tokenizer that are there already, in place of all else; without a draft.
    loaded: tuple[PreTrainedModel, Any] | None = None

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
        return self.draft or (str(EMBEDDED_DRAFT_DIR) if self.name is None and self.loaded is None else None)

    def tokenizer(self) -> Any:
        """The tokenizer."""
        if self.loaded is not None:
            return self.loaded[1]
        with naming(self.name or EMBEDDED_MODEL_DIR):
            return AutoTokenizer.from_pretrained(self.name or EMBEDDED_MODEL_DIR)

    def load(self, attention: str | None = None) -> PreTrainedModel:
        """The model in eval mode, on its device.

        Args:
            attention: The model's attention implementation; None for the default one.
        """
        if self.loaded is not None:
            return self.loaded[0]
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
            attention: The attention implementation; None for the default one.
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


class Models:
    """Loads models when they are first asked for.

    Args:
        source: Where they come from.
        folder: For the files of streamed layers.
    """

    def __init__(self, source: ModelOrigin, folder: Path) -> None:
        self.source, self.folder = source, folder
        self._loaded: dict[tuple[str | None, bool], Counted] = {}

    def get(self, attention: str | None = None, *, streamed: bool = False) -> Counted:
        """The model that computes in this way.

        Args:
            attention: The model's attention implementation; None for the default one.
            streamed: Whether its layers are streamed.
        """
        if (attention, streamed) not in self._loaded:
            source = self.source
            model = source.load_streamed(self.folder, attention) if streamed else source.load(attention)
            self._loaded[attention, streamed] = Counted(model, ForwardCount(model))
        return self._loaded[attention, streamed]
