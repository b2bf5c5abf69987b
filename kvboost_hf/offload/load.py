"""`load_streamed`: loads a model and streams its layers, by a quantizer of transformers.

transformers calls a quantizer before and after it loads weights. Before, the quantizer removes the tensors of layers
from the model, which is on the meta device, so that transformers loads only the rest. After, it loads each layer by
transformers' own functions, which rename, merge and cast tensors, and moves its bytes to where the plan says.
"""

import copy
import logging
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.logging import tqdm
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvboost_hf.compat import available_device, for_config, loader_of, naming
from kvboost_hf.config import StreamingConfig, require_streaming
from kvboost_hf.offload.awq.experts import AwqExperts
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.awq.head import round_head
from kvboost_hf.offload.awq.int4pack import order_name
from kvboost_hf.offload.awq.swap import awq_config, expect_stored, lay_out, save_converted, swap_linears, to_gemm
from kvboost_hf.offload.build import StreamBuilder, default_device
from kvboost_hf.offload.checkpoint import Checkpoint

logger = logging.getLogger(__name__)
METHOD = "kvboost_stream"


def load_streamed(
    name: str | PathLike[str],
    streaming: StreamingConfig | None = None,
    *,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model that may be larger than the memory of its device.

    Weights are loaded layer by layer to where they stay: never all onto the device, and none twice into host memory.
    The checkpoint may be in 4 bits, of AWQ, GPTQ or compressed-tensors, or not quantized.

    Args:
        name: A name on the hub, or a folder with safetensors files.
        streaming: Which layers stay on the device; by default as many as fit.
        device: The device that computes; by default the accelerator, or the CPU if there is none.
        kwargs: For `from_pretrained()`, such as `dtype` and `attn_implementation`.

    Returns:
        A model that works with `generate()`, pipelines, `ChunkReuseCache`, `kvboost_fa2` and assistants as any other.

    Raises:
        ValueError: there is no such model, it is no decoder of text, the checkpoint is quantized in another way, has
            other files or is incomplete, not even two slots fit into the budget, or the device does not exist.

    Example:
        >>> from kvboost_hf import StreamingConfig, load_streamed
        >>> from kvboost_hf.assets import EMBEDDED_MODEL_DIR
        >>> model = load_streamed(EMBEDDED_MODEL_DIR, StreamingConfig(keep_first_k=1, keep_last_k=1))
    """
    if not isinstance(name, str | PathLike):
        raise ValueError(
            f"`name` must be a name on the hub or a folder, got {type(name).__name__}. A model that is there already "
            "goes to stream_layers(model)."
        )
    if "gguf_file" in kwargs or str(name).endswith(".gguf"):
        raise ValueError(
            f"{kwargs.get('gguf_file', name)} is a GGUF file, which transformers turns into plain weights in host "
            "memory. Load it with from_pretrained(gguf_file=...) and pass the model to stream_layers()."
        )
    if kwargs.get("quantization_config") is not None:
        raise ValueError(
            f"Weights are streamed as the checkpoint has them, got quantization_config="
            f"{type(kwargs['quantization_config']).__name__}. Leave it out, or load the model without streaming."
        )
    if kwargs.get("output_loading_info"):
        raise ValueError(
            "load_streamed() returns the model alone, got output_loading_info=True. Call "
            "from_pretrained(name, config=with_streaming(name, streaming), output_loading_info=True)."
        )
    if device is not None:
        kwargs["device_map"] = {"": available_device(device)}
    of_config = for_config(kwargs)
    config = with_streaming(kwargs.pop("config", None) or name, streaming or StreamingConfig(), **of_config)
    with naming(name, (OSError,)):  # a ValueError may be about the arguments
        model = loader_of(config).from_pretrained(name, config=config, **kwargs)
    assert isinstance(model, PreTrainedModel)
    return model


@register_quantization_config(METHOD)
class LayerStreamingQuantizationConfig(QuantizationConfigMixin):
    """The quantization config of streamed models, made by `with_streaming()`.

    Args:
        streaming: The arguments of a `StreamingConfig`.
        checkpoint: The quantization config of the checkpoint; None if it has none.
    """

    def __init__(self, streaming: dict[str, Any], checkpoint: dict[str, Any] | None = None, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.streaming = streaming
        self.checkpoint = checkpoint


def with_streaming(
    name_or_config: str | PathLike[str] | PreTrainedConfig, streaming: StreamingConfig, **kwargs: Any
) -> PreTrainedConfig:
    """A copy of a model's configuration with which `from_pretrained()` streams its layers.

    Args:
        name_or_config: A name on the hub, a folder, or a configuration.
        streaming: Which layers stay on the device.
        kwargs: For `AutoConfig.from_pretrained()`.

    Raises:
        ValueError: there is no such model, or its checkpoint is quantized in a way that cannot be streamed.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from kvboost_hf import StreamingConfig, with_streaming
        >>> from kvboost_hf.assets import EMBEDDED_MODEL_DIR
        >>> config = with_streaming(EMBEDDED_MODEL_DIR, StreamingConfig(keep_first_k=1, keep_last_k=1))
        >>> model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR, config=config)
    """
    require_streaming(streaming)
    if isinstance(name_or_config, PreTrainedConfig):
        config = copy.deepcopy(name_or_config)
    else:
        with naming(name_or_config):
            config = AutoConfig.from_pretrained(name_or_config, **kwargs)
    holder, found = _checkpoint_quantization(config)
    if found is not None and found.get("quant_method") == METHOD:
        found = found["checkpoint"]
    if found is not None:
        PackedFormat.of(found)  # refuses what cannot be streamed
        del holder.quantization_config
    config.quantization_config = {"quant_method": METHOD, "streaming": asdict(streaming), "checkpoint": found}
    return config


def _checkpoint_quantization(config: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    for holder in (config, config.get_text_config(decoder=True)):
        found = getattr(holder, "quantization_config", None)
        if found is not None:
            return holder, found if isinstance(found, dict) else found.to_dict()
    return config, None


@register_quantizer(METHOD)
class LayerStreamingQuantizer(HfQuantizer):
    """Loads layers one by one to the places that the plan gives them."""

    requires_calibration = False

    def __init__(self, quantization_config: LayerStreamingQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True  # nothing is quantized while it is loaded
        self._streaming = StreamingConfig(**quantization_config.streaming)
        checkpoint = quantization_config.checkpoint
        self._packed = None if checkpoint is None else PackedFormat.of(checkpoint)
        self._unsaved: str | None = None  # why it cannot be saved
        self._compiles = False  # all layers stay, and have no experts, which are chosen on the host
        self._device = default_device()

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any]:
        """Map the model to the device that computes; the plan decides which layers are on it.

        Raises:
            ValueError: for a map with more than one device.
        """
        if isinstance(device_map, dict) and device_map:
            devices = {f"cuda:{each}" if isinstance(each, int) else str(each) for each in device_map.values()}
            if len(devices) > 1 or devices & {"disk", "meta"}:
                raise ValueError(
                    f"Streamed layers compute on one device, got a `device_map` with {sorted(devices)}. Name one, or "
                    "leave it out: StreamingConfig says what is kept elsewhere."
                )
            self._device = torch.device(devices.pop())
        return {"": self._device}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, dtype: Any = None, **kwargs: Any
    ) -> PreTrainedModel:
        self._checkpoint = Checkpoint(model, checkpoint_files, self)
        packed = self._packed
        if packed is not None:
            swap_linears(model, packed, self._checkpoint.quantized(packed.words), self._streaming.quant_kernel)
            lay_out(model, self._device)
        on_cpu = packed is not None and self._device.type == "cpu"
        origin = self._checkpoint.origin(order_name() if on_cpu else None)
        self._builder = StreamBuilder(model, self._streaming, self._device, origin)
        if packed is not None:
            expect_stored(model)
        # Embeddings that stay in host memory are loaded after the layers: the device may have no room for them.
        waiting = self._builder.waiting_embeddings
        self._checkpoint.take_out([*self._builder.layers, *([] if waiting is None else [waiting.module])])
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        builder, checkpoint = self._builder, self._checkpoint
        rounded = 0
        with torch.inference_mode(False), torch.no_grad():
            for number, unit in enumerate(tqdm(builder.units, desc="Loading layers")):
                streamed = unit.prefixes if builder.is_streamed(number) else ()
                staying = checkpoint.put_back(number, streamed)
                if staying or not builder.has_file(number):
                    checkpoint.load(number, self._device, streamed)
                rounded += to_gemm(unit.layer)
                lay_out(unit.layer, self._device)
                save_converted(unit.layer, False)  # transformers asks for a state_dict() at each layer, for its names
                if streamed:
                    builder.take(number)
            if builder.waiting_embeddings is not None:
                checkpoint.put_back(len(builder.units), ("",))
                checkpoint.load(len(builder.units), self._device, ("",))
            rounded += to_gemm(model)  # what is outside of layers, such as a head in 4 bits
            lay_out(model, self._device)
            stream = builder.finish()
            self._compiles = stream is None and not any(isinstance(each, AwqExperts) for each in model.modules())
            save_converted(model, True)
        del self._builder, self._checkpoint
        if rounded:
            logger.warning(
                "%d scales of 4-bit weights were rounded to float16, which the kernels read: they have more than 11 "
                "bits, or are below 6e-5.",
                rounded,
            )
        if self._packed is None:
            self._leave(model)
        else:
            saved, self._unsaved = awq_config(model, self._packed)
            model.config.quantization_config = saved
        if self._streaming.head_bits is not None:
            with torch.inference_mode(False), torch.no_grad():
                round_head(model, self._device)
        return model

    def _leave(self, model: PreTrainedModel) -> None:
        """Remove the marks of a quantized model."""
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        del model.is_quantized
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)

    def is_serializable(self) -> bool:
        """Whether it can be saved: as an AWQ checkpoint."""
        if self._unsaved is not None:
            logger.warning("%s Copy the files of the checkpoint instead.", self._unsaved)
        return self._unsaved is None

    @property
    def is_compileable(self) -> bool:
        """Whether decoding can be compiled: where no hook brings layers, and the host chooses no experts."""
        return self._compiles

    @property
    def is_trainable(self) -> bool:
        """Whether weights can be trained: streamed ones cannot."""
        return False
