"""Models with streamed layers on a CPU, where slots are poisoned until their copy has been waited for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf import StreamingConfig
from tests.conftest import make_model
from tests.internals.offload import LayerBackend, LayerStream, ModelSizes, ResidencyPlan, StreamBuilder, use_backend
from tests.offload.poisoning import PoisoningBackend

FULL_STREAM = StreamingConfig(residency_mode="full_stream")


def make_layers(count: int, name: str = "deep_llama") -> Any:
    """A tiny model of so many layers."""
    model = make_model(name)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return model.eval()


def stream_except(
    model: PreTrainedModel,
    resident: Sequence[int],
    n_slots: int = 2,
    *,
    config: StreamingConfig = FULL_STREAM,
    make: Callable[[], Any] = PoisoningBackend,
) -> LayerStream | None:
    """Stream all layers but some, whatever a planner would say to that."""
    with use_backend(make), torch.no_grad():
        builder = StreamBuilder(model, config, torch.device("cpu"))
        streamed = tuple(number for number in range(len(builder.layers)) if number not in resident)
        builder.plan = replace(builder.plan, resident=tuple(resident), in_host=streamed, on_disk=(), n_slots=n_slots)
        for number in streamed:
            builder.take(number)
        return builder.finish()


def stream_everything(sizes: ModelSizes, config: StreamingConfig, *, free_bytes: int | None) -> ResidencyPlan:
    """In place of the planner, which keeps the layers of a model that has no more of them than slots."""
    layers = tuple(range(len(sizes.layer_bytes)))
    slot_bytes = max(sizes.layer_bytes)
    return ResidencyPlan(
        resident=(), in_host=layers, on_disk=(), n_slots=2, slot_bytes=slot_bytes, sizes=sizes, reserved_bytes=0
    )


def double_of(stream: LayerStream | None) -> Any:
    """The double behind a stream."""
    assert stream is not None
    backend: LayerBackend = stream.backend
    return backend
