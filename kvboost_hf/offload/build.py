"""Converts loaded layers to streamed ones, one at a time, so that no weight is in memory twice."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.compat import available_device, decoder_layers, weights_come_and_go
from kvboost_hf.config import StreamingConfig, require_streaming
from kvboost_hf.errors import StreamingError
from kvboost_hf.offload.awq.experts import AwqExperts
from kvboost_hf.offload.awq.head import round_head
from kvboost_hf.offload.awq.linear import AwqLinear
from kvboost_hf.offload.awq.matmul import runs_triton
from kvboost_hf.offload.awq.swap import lay_out
from kvboost_hf.offload.backend import free_bytes, is_overridden, make_backend, make_mapping
from kvboost_hf.offload.cuda import BUFFER_BYTES
from kvboost_hf.offload.disk import FileSource, LayerFolder, Origin, require_open_files
from kvboost_hf.offload.host import HostSource, LayerMemory, cuda_pinning
from kvboost_hf.offload.plan import ResidencyPlan, plan_residency
from kvboost_hf.offload.sizes import sizes_of
from kvboost_hf.offload.sources import FlatLayout, LayerSource, in_memory
from kvboost_hf.offload.stream import LayerStream, LayerStreamingHook, StreamingStats
from kvboost_hf.offload.units import Holder, Unit, find_units, input_embeddings, is_made, parts_of, rebuilt

logger = logging.getLogger(__name__)


class StreamBuilder:
    """Takes the layers of one model as they are loaded, and moves their bytes to where the plan says.

    Args:
        model: The model, whose tensors may be on the meta device.
        config: The streaming settings.
        device: The device that computes.
        origin: Where the weights come from, so that files are found before they are loaded; None if not known.

    Raises:
        ValueError: as `find_units` and `plan_residency` do.
    """

    def __init__(
        self, model: PreTrainedModel, config: StreamingConfig, device: torch.device, origin: Origin | None = None
    ) -> None:
        self.layers = decoder_layers(model)
        if not self.layers:
            raise ValueError(
                f"{type(model).__name__} has no list of decoder layers that could be streamed. Load it without a "
                "StreamingConfig."
            )
        self.device = device
        self.units = find_units(model, self.layers, ffn_only=config.residency_mode == "ffn_only_stream")
        self.layouts = [unit.layout() for unit in self.units]
        self._mapping = make_mapping(device) if config.host_embeddings and config.pin_memory else None
        self._embeddings = None if self._mapping is None else input_embeddings(model)
        gpu = device.type == "cuda"
        awq = any(isinstance(module, AwqLinear | AwqExperts) for module in model.modules())
        triton = not (gpu and awq) or runs_triton(config.quant_kernel, device)
        sizes = sizes_of(model, self.units, config, self._embeddings, gpu=gpu, triton=triton)
        pinning = cuda_pinning(device) if config.pin_memory and gpu and not is_overridden() else None
        self._memory = LayerMemory(pinning, kept_bytes=BUFFER_BYTES)
        self._model, free = model, free_bytes(device)
        self.plan = plan_residency(sizes, config, free_bytes=free)
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None  # for embeddings: in host memory, and mapped
        remains = None
        if self.plan.host_embeddings:
            try:
                self._table = self._map_table(sizes.embedding_bytes)
            except RuntimeError as error:
                remains = f"The input embeddings, {sizes.embedding_bytes} bytes, stay on {device}: {error}."
                self.plan = plan_residency(replace(sizes, embedding_bytes=0), config, free_bytes=free)
        notes = self.plan.notes
        if remains is not None:
            self.plan = replace(self.plan, notes=(*notes, remains))
        for note in notes if self._memory.refused else self.plan.notes:  # of what is refused the memory warns
            logger.warning(note)
        self._folder = None
        if self.plan.on_disk:
            assert config.disk_folder is not None
            require_open_files(len(self.plan.on_disk))
            self._folder = LayerFolder(config.disk_folder, origin)
        self._found: dict[int, FileSource] = {}  # in files, and not taken yet
        self._sources: dict[int, LayerSource] = {}

    def is_streamed(self, number: int) -> bool:
        """Whether a layer is streamed, not resident on the device."""
        return number not in self.plan.resident

    def has_file(self, number: int) -> bool:
        """Whether a file has the bytes of a layer already, so that they need not be loaded."""
        if self._folder is None or number not in self.plan.on_disk:
            return False
        source = self._folder.find(number, self.layouts[number])
        if source is not None:
            self._found[number] = source  # which nobody removes from now on
        return source is not None

    def take(self, number: int) -> None:
        """Move the bytes of a streamed layer, whose tensors have been loaded, to host memory or a file."""
        unit, layout = self.units[number], self.layouts[number]
        if number in self.plan.on_disk:
            source = self._found.pop(number, None)
            if source is None:
                assert self._folder is not None
                flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
                _fill(unit, layout, flat)
                source = self._folder.write(number, flat, layout)
            self._sources[number] = source
            unit.put({name: tensor.detach().to("meta") for name, tensor in unit.tensors().items()})
            return
        flat = self._memory.allocate(layout.nbytes)
        unit.put(_fill(unit, layout, flat))
        self._sources[number] = HostSource(flat)

    @property
    def waiting_embeddings(self) -> Holder | None:
        """The input embeddings, if they stay in host memory. Until `finish` they must be on the CPU."""
        return self._embeddings if self.plan.host_embeddings else None

    def _map_table(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pinned memory, and the same bytes as a tensor of the device."""
        assert self._mapping is not None
        flat = self._memory.allocate(nbytes, must_pin=True)
        return flat, self._mapping(flat)

    def _take_embeddings(self, holder: Holder) -> None:
        """Move the embeddings to pinned memory, from which the device reads them."""
        weight = holder.get()
        assert weight is not None
        assert self._table is not None
        flat, mapped = self._table
        flat.view(weight.dtype).view(weight.shape).copy_(weight)
        holder.put(mapped.view(weight.dtype).view(weight.shape))

    def give_back(self) -> None:
        """Undo `take`: read tensors whose bytes are in files back into memory."""
        for number, source in self._sources.items():
            if source.host is None:
                self.units[number].put(self.layouts[number].views(in_memory(source)))

    def finish(self) -> LayerStream | None:
        """Install the hooks; returns None if no layer is streamed."""
        numbers = sorted(self._sources)
        self._memory.close()
        if self._folder is not None:
            self._folder.finish()
        if not numbers:
            return None
        if self.waiting_embeddings is not None:
            self._take_embeddings(self.waiting_embeddings)
        with torch.inference_mode(False):  # slots are written to inside and outside of it
            stream = LayerStream(
                self.plan,
                [self.units[number] for number in numbers],
                [self.layouts[number] for number in numbers],
                [self._sources[number] for number in numbers],
                min(self.plan.n_slots, len(numbers)),
                make_backend(self.device),
                _owner(self._model, self.layers),
            )
            for place, number in enumerate(numbers):
                add_hook_to_module(self.units[number].module, LayerStreamingHook(stream, place), append=True)
        return stream


def stream_layers(
    model: PreTrainedModel, config: StreamingConfig, *, device: torch.device | str | None = None
) -> PreTrainedModel:
    """Stream the layers of a model that is loaded in host memory.

    `load_streamed()` streams while loading, and needs no more memory than the layers take.

    Args:
        model: A causal language model, on the CPU.
        config: Which layers stay on the device.
        device: The device that computes; by default the accelerator, or the CPU if there is none.

    Returns:
        The same model. It works with `generate()`, pipelines, caches and assistants as before.

    Raises:
        ValueError: the layers cannot be found or moved by copying bytes, or do not fit into the budget, or the device
            does not exist.
        StreamingError: the layers are streamed already, or accelerate moves them.
        OSError: the disk is full, or cannot be written to; the model has its weights all the same.

    Example:
        >>> from kvboost_hf import StreamingConfig, stream_layers, streaming_stats
        >>> from kvboost_hf.assets import load_embedded
        >>> model = stream_layers(load_embedded()[0], StreamingConfig(keep_first_k=1), device="cpu")
        >>> streaming_stats(model)  # host and device share their memory: nothing to stream
    """
    require_streaming(config)
    if weights_come_and_go(model):
        raise StreamingError(
            f"This {type(model).__name__} has hooks of accelerate. Load it without a device_map, or take them off "
            "with accelerate's remove_hook_from_submodules(model)."
        )
    where = default_device() if device is None else available_device(device)
    with torch.inference_mode(False), torch.no_grad():
        lay_out(model, where)
        _make_portable(model, where)
        builder = StreamBuilder(model, config, where)
        try:
            for number in range(len(builder.units)):
                if builder.is_streamed(number):
                    builder.take(number)
            streamed = {
                id(holder.get())
                for number, unit in enumerate(builder.units)
                if builder.is_streamed(number)
                for holder in unit.holders.values()
            }
            if builder.waiting_embeddings is not None:
                streamed.add(id(builder.waiting_embeddings.get()))
            _move(model, where, streamed)
            if config.head_bits is not None:
                round_head(model, where)
            builder.finish()
        except BaseException:
            builder.give_back()
            raise
    return model


def default_device() -> torch.device:
    """The accelerator, or the CPU if there is none; a build for GPUs may run where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def streamed_layers(model: nn.Module) -> LayerStream | None:
    """The stream behind the hooks of a model, or None."""
    for module in model.modules():
        for hook in _hooks(getattr(module, "_hf_hook", None)):
            if isinstance(hook, LayerStreamingHook):
                return hook.stream
    return None


def streaming_stats(model: nn.Module) -> StreamingStats | None:
    """Counts and times of a model's streaming so far; None if no layer is streamed."""
    stream = streamed_layers(model)
    return None if stream is None else stream.stats()


def streaming_plan(model: nn.Module) -> ResidencyPlan | None:
    """Where the layers of a model are, with the rate of the copies so far; None if no layer is streamed."""
    stream = streamed_layers(model)
    return None if stream is None else replace(stream.plan, copy_rate=stream.backend.copy_rate() or None)


def stop_streaming(model: nn.Module) -> nn.Module:
    """Give all layers their weights back, in host memory, and remove the hooks."""
    for module in model.modules():
        hooks = _hooks(getattr(module, "_hf_hook", None))
        kept = [hook for hook in hooks if not isinstance(hook, LayerStreamingHook)]
        if len(kept) < len(hooks):
            remove_hook_from_module(module)
            for hook in kept:
                add_hook_to_module(module, hook, append=True)
    return model


def _hooks(hook: Any) -> list[Any]:
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def _fill(unit: Unit, layout: FlatLayout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    views = layout.views(flat)
    for name, tensor in unit.tensors().items():
        views[name].copy_(tensor)
    return views


def _make_portable(model: nn.Module, device: torch.device) -> None:
    """Make weights that are made of several tensors such that their bytes mean the same on the device.

    optimum-quanto packs 4-bit weights for the kernels of the device where they are, and can undo it.

    Raises:
        ValueError: a weight of another library would have to go to a device of another type.
    """
    for owner, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_made(parameter):
                continue
            if parameter.device.type == device.type:
                continue
            kind = type(parameter)
            if not kind.__module__.startswith("optimum.quanto."):
                raise ValueError(
                    f"{owner}.{name} is a {kind.__module__}.{kind.__qualname__} on {parameter.device}, which may be "
                    f"packed for kernels there; it is not streamed to {device}. Load the checkpoint without this "
                    "quantization, or keep the whole model on the device."
                )
            if hasattr(kind, "weight_qbits_tensor") and kind.__name__ != "WeightQBitsTensor":
                Holder(module, name).put(parameter.weight_qbits_tensor())


def _move(model: nn.Module, device: torch.device, streamed: Iterable[int]) -> None:
    """Move the model to the device, except tensors with these ids."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in streamed:
                continue
            if is_made(parameter):
                parts = {part: tensor.to(device) for part, tensor in parts_of(parameter, name)}
                Holder(module, name).put(rebuilt(parameter, name, parts))
            else:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in streamed:
                module._buffers[name] = buffer.to(device)


def _owner(model: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """The module that runs the layers."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(found is layers[0] for found in child):
                return module
    return model
