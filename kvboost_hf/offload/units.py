"""Finds the streamed units of a model: modules, and the tensors of these that are streamed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from transformers import PreTrainedModel

from kvboost_hf.offload.sources import FlatLayout

_ATTENTION = ("attn", "attention")


@dataclass(frozen=True, slots=True)
class Holder:
    """A parameter or buffer of a module, by name."""

    module: nn.Module  # the module
    attribute: str  # the name in the module

    @property
    def _tensors(self) -> dict[str, torch.Tensor | None]:
        own = self.module._parameters
        return own if self.attribute in own else self.module._buffers  # type: ignore[return-value]

    def get(self) -> torch.Tensor | None:
        """The tensor; None if there is none."""
        return self._tensors.get(self.attribute)

    def put(self, tensor: torch.Tensor | None) -> None:
        """Replace the tensor; a parameter keeps its `requires_grad`."""
        tensors = self._tensors
        before = tensors.get(self.attribute)
        if tensor is not None and tensors is self.module._parameters:
            tensor = nn.Parameter(tensor, requires_grad=before is not None and before.requires_grad)
        tensors[self.attribute] = tensor


@dataclass(frozen=True, slots=True)
class Unit:
    """The part of a decoder layer that is streamed at once."""

    module: nn.Module  # the module whose forward needs it
    holders: dict[str, Holder]  # the tensors of the unit, by their names in `layer`
    layer: nn.Module  # the decoder layer
    prefixes: tuple[str, ...]  # the prefixes of the names of the unit's tensors in `layer`

    def tensors(self) -> dict[str, torch.Tensor]:
        """The current tensors by name; of a tensor that is made of others, these."""
        held = {name: holder.get() for name, holder in self.holders.items()}
        return dict(part for name, tensor in held.items() if tensor is not None for part in parts_of(tensor, name))

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the tensors, named as `tensors()` names them."""
        for name, holder in self.holders.items():
            before = holder.get()
            if before is not None and is_made(before):
                holder.put(rebuilt(before, name, tensors))
            elif name in tensors:
                holder.put(tensors[name])

    def layout(self) -> FlatLayout:
        """The layout of the tensors in one buffer."""
        return FlatLayout(self.tensors())


def find_units(model: nn.Module, layers: Sequence[nn.Module], *, ffn_only: bool) -> list[Unit]:
    """Find the unit of each layer: the layer, or its feed-forward part.

    Tensors that several layers share, or that are tied to tensors outside, are not streamed.

    Raises:
        ValueError: a layer has no recognizable feed-forward part, or weights that cannot be moved by copying bytes.
    """
    shared = shared_tensors(model, layers)
    return [_unit(layer, shared, ffn_only) for layer in layers]


def input_embeddings(model: PreTrainedModel) -> Holder | None:
    """The input embeddings; None if they are tied to the head, or no plain table."""
    module = model.get_input_embeddings()
    if not isinstance(module, nn.Embedding):
        return None
    tied = shared_tensors(model, [module])
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if id(module.weight) in tied or getattr(head, "weight", None) is module.weight:
        return None
    return Holder(module, "weight")


def persistent_holders(module: nn.Module) -> Iterator[tuple[str, Holder]]:
    """All parameters of a module and its children, and the buffers that are saved with it."""
    for prefix, child in module.named_modules(remove_duplicate=True):
        skipped = child._non_persistent_buffers_set
        names = [*child._parameters, *(name for name in child._buffers if name not in skipped)]
        for name in names:
            yield f"{prefix}.{name}" if prefix else name, Holder(child, name)


def is_made(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is made of others, which can be replaced, and has no memory of its own."""
    return bool(is_traceable_wrapper_subclass(tensor))


def parts_of(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor is made of, such as levels and scales of a quantized weight, with names."""
    if is_made(tensor):
        inside: Any = tensor
        for inner in inside.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, inner), f"{name}.{inner}")
    else:
        yield name, tensor


def rebuilt(tensor: torch.Tensor, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor like `tensor`, made of other parts, which are named as by `parts_of`."""
    if is_made(tensor):
        transform: Any = transform_subclass
        made: torch.Tensor = transform(tensor, lambda inner, part: rebuilt(part, f"{name}.{inner}", parts))
        return made
    return parts[name]


def _unit(layer: nn.Module, shared: set[int], ffn_only: bool) -> Unit:
    parts = _feed_forward(layer) if ffn_only else {"": layer}
    holders: dict[str, Holder] = {}
    for prefix, part in parts.items():
        for name, holder in persistent_holders(part):
            tensor = holder.get()
            if tensor is None or id(tensor) in shared or not tensor.numel():
                continue
            for inside, held in parts_of(tensor, name):
                _require_plain(held, inside, layer)
            holders[f"{prefix}.{name}" if prefix else name] = holder
    module = next(iter(parts.values())) if len(parts) == 1 else layer
    return Unit(module, holders, layer, tuple(f"{prefix}." if prefix else "" for prefix in parts))


def _feed_forward(layer: nn.Module) -> dict[str, nn.Module]:
    """The children with matrices that are not attention."""
    found = {
        name: child
        for name, child in layer.named_children()
        if not any(word in name.lower() or word in type(child).__name__.lower() for word in _ATTENTION)
        and any(tensor.ndim > 1 for tensor in [*child.parameters(), *child.buffers()])
    }
    if not found:
        raise ValueError(
            f"residency_mode 'ffn_only_stream' needs layers with a feed-forward part; {type(layer).__name__} has none "
            "that can be distinguished from its attention. Use 'partial_resident'."
        )
    return found


def shared_tensors(model: nn.Module, layers: Sequence[nn.Module]) -> set[int]:
    """Ids of tensors that several layers share, or a layer and the rest of the model."""
    owners: dict[int, int] = {}
    shared: set[int] = set()
    for number, layer in enumerate(layers):
        for _, holder in persistent_holders(layer):
            if owners.setdefault(id(holder.get()), number) != number:
                shared.add(id(holder.get()))
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            shared |= {id(t) for t in [*module._parameters.values(), *module._buffers.values()] if id(t) in owners}
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    tied = {*ties, *ties.values()}
    return shared | {id(parameter) for name, parameter in model.named_parameters() if name in tied}


def _require_plain(tensor: torch.Tensor, name: str, layer: nn.Module) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise ValueError(
            f"{name} of {type(layer).__name__} is a {type(tensor).__name__}, which is more than its bytes. Streaming "
            "is for checkpoints in 4 bits, for weights of optimum-quanto, and for those that are not quantized. Use "
            "this model without it."
        )
