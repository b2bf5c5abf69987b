"""Which layers stay on the device, which wait in host memory and which in files: pure arithmetic, no tensors."""

from dataclasses import dataclass

from kvboost_hf.config import StreamingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a model takes, in bytes.

    Args:
        layer_bytes: Of each decoder layer, what can be streamed of it: all, or its feed-forward part.
        other_bytes: What always stays on the device: embeddings, norms, the head, and what of layers is not streamed.
        kv_bytes: K/V of as many tokens as the configuration makes room for.
        activation_bytes: What else a forward takes at its peak.
    """

    layer_bytes: tuple[int, ...]
    other_bytes: int
    kv_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPlan:
    """Where each decoder layer is.

    Args:
        resident: Indices of layers that stay on the device, ascending.
        in_host: Of those that are streamed from host memory.
        on_disk: Of those that are streamed from files.
        n_slots: Places on the device that streamed layers take in turn; 0 if none is streamed.
        slot_bytes: Bytes of one slot: of the largest streamed layer.
        sizes: What was planned for.
        reserved_bytes: What is left free for others.
        notes: Sentences about where the plan is not what was asked for, and why.
    """

    resident: tuple[int, ...]
    in_host: tuple[int, ...]
    on_disk: tuple[int, ...]
    n_slots: int
    slot_bytes: int
    sizes: ModelSizes
    reserved_bytes: int
    notes: tuple[str, ...] = ()


def plan_residency(sizes: ModelSizes, config: StreamingConfig, *, free_bytes: int | None) -> ResidencyPlan:
    """Decide where each layer is.

    Args:
        sizes: What the model takes.
        config: What is asked for.
        free_bytes: Free memory of the device; None where host and device share their memory, so that all layers
            stay but those that go to files.

    Raises:
        ValueError: not even the slots fit into the budget; it names the smallest that would do.
    """
    raise NotImplementedError
