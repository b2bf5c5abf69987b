"""Plans which layers stay on the device, which in host memory and which in files, and when each is copied into a slot.

Resident layers are spread evenly among the streamed ones, beginning with the first layer, so that copies continue
while they are computed: several in a row would leave the link idle once all slots are full. `benchmarks/ring.py`
computes by how much, and why the number of streamed layers need not be a multiple of the slots.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvboost_hf.config import StreamingConfig

FREE_SHARE = 0.9  # of the free memory, if there is no budget
SHOWN_RATE = 25e9  # bytes per second, about what PCIe 4.0 with 16 lanes copies; shown where none was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model in bytes."""

    # Bytes of each decoder layer that can be streamed: all of it, or its feed-forward part.
    layer_bytes: tuple[int, ...]
    other_bytes: int  # weights that always stay on the device: embeddings, norms, the head, and the rest of the layers
    kv_bytes: int  # K/V of `max_tokens` tokens
    activation_bytes: int  # activations of a forward at its peak
    embedding_bytes: int = 0  # those of `other_bytes` that are input embeddings, if they may stay in host memory
    workspace_bytes: int = 0  # workspaces of matrix products on a GPU
    # The device and the dtypes that these sizes hold for, in words.
    counted_for: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPlan:
    """The place of each decoder layer.

    Args:
        resident: Indices of layers that stay on the device, ascending.
        in_host: Indices of layers that are streamed from host memory.
        on_disk: Indices of layers that are streamed from files.
        n_slots: Slots on the device that streamed layers share in turn; 0 if none is streamed.
        slot_bytes: Bytes of one slot, those of the largest streamed layer.
        sizes: The sizes that were planned for.
        reserved_bytes: Bytes of the device left free for others.
        host_embeddings: Whether the input embeddings stay in host memory.
        notes: Sentences about where the plan differs from the settings, and why.
        copy_rate: Bytes per second at which layers were copied to the device, or read from files; None if nothing was
            copied yet.
    """

    resident: tuple[int, ...]
    in_host: tuple[int, ...]
    on_disk: tuple[int, ...]
    n_slots: int
    slot_bytes: int
    sizes: ModelSizes
    reserved_bytes: int
    host_embeddings: bool = False
    notes: tuple[str, ...] = ()
    copy_rate: float | None = field(default=None, compare=False)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the peak, those reserved for others included."""
        return sum(self._on_device().values())

    @property
    def host_bytes(self) -> int:
        """Bytes of streamed layers, and of the input embeddings if they are there, in host memory."""
        return self._nbytes(self.in_host) + self.host_embeddings * self.sizes.embedding_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of streamed layers in files."""
        return self._nbytes(self.on_disk)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each forward copies to the device."""
        return self._nbytes(self.in_host) + self.disk_bytes

    def tokens_per_s(self, link_bytes_per_s: float, disk_bytes_per_s: float = math.inf) -> float:
        """The most forwards per second that copies leave time for; infinite if nothing is streamed.

        Args:
            link_bytes_per_s: Bytes per second of copies to the device.
            disk_bytes_per_s: Bytes per second of reading files, which goes on beside the copies.
        """
        seconds = max(self.streamed_bytes / link_bytes_per_s, self.disk_bytes / disk_bytes_per_s)
        return 1 / seconds if seconds else math.inf

    def __str__(self) -> str:
        rows = {
            **self._on_device(),
            "device, in all": self.device_bytes,
            f"{len(self.in_host)} layers in host memory": self._nbytes(self.in_host),
            **({"embeddings in host memory": self.sizes.embedding_bytes} if self.host_embeddings else {}),
            f"{len(self.on_disk)} layers in files": self.disk_bytes,
        }
        lines = [self.sizes.counted_for] if self.sizes.counted_for else []
        lines += [f"{name:<28}{nbytes / 1e9:>9.3f} GB" for name, nbytes in rows.items()]
        if self.streamed_bytes:
            lines.append(self._ceiling())
        return "\n".join([*lines, *self.notes])

    def _ceiling(self) -> str:
        """A sentence about the speed that copies leave time for, at the measured rate if there is one."""
        if self.copy_rate is not None:
            most = self.tokens_per_s(self.copy_rate)
            return f"At {self.copy_rate / 1e9:.2f} GB/s, as measured, at most {most:.2f} tokens/s."
        if self.on_disk:
            return f"Each forward reads {self.disk_bytes / 1e9:.3f} GB from files; how fast is measured as it runs."
        return f"At {SHOWN_RATE / 1e9:g} GB/s at most {self.tokens_per_s(SHOWN_RATE):.2f} tokens/s."

    def _on_device(self) -> dict[str, int]:
        return {
            f"{len(self.resident)} resident layers": self._nbytes(self.resident),
            f"{self.n_slots} slots": self.n_slots * self.slot_bytes,
            "embeddings, norms, head": self.sizes.other_bytes - self.host_embeddings * self.sizes.embedding_bytes,
            "K/V": self.sizes.kv_bytes,
            "activations": self.sizes.activation_bytes,
            "workspaces": self.sizes.workspace_bytes,
            "reserved": self.reserved_bytes,
        }

    def _nbytes(self, layers: Iterable[int]) -> int:
        return sum(self.sizes.layer_bytes[layer] for layer in layers)


def plan_residency(sizes: ModelSizes, config: StreamingConfig, *, free_bytes: int | None) -> ResidencyPlan:
    """Decide where each layer is.

    If layers differ in size, the largest stay on the device, and the largest streamed ones in host memory.

    Args:
        sizes: The sizes of the model.
        config: The streaming settings.
        free_bytes: Free memory of the device; None if host and device share their memory, so that all layers stay
            except those in files.

    Raises:
        ValueError: not even the slots fit into the budget; it names the smallest that would do.
    """
    choices, shared, limit, notes = _choices(sizes, config), free_bytes is None, config.vram_bytes, []
    if shared and (config.disk_folder is None or (limit is None and len(choices) > 1)):
        if config.residency_mode != "full_resident":
            notes.append(
                "All layers stay, since host and device share their memory. With a `disk_folder` and a `vram_budget`, "
                "what does not fit is read from files."
            )
        choices, limit = [range(len(sizes.layer_bytes))], None
    if shared and config.host_budget is not None:
        notes.append("`host_budget` is not used, since host and device share their memory.")
    plans = [_plan(sizes, config, resident, shared=shared) for resident in choices]
    by_budget = limit is not None and (free_bytes is None or limit <= free_bytes)
    if free_bytes is not None and limit is not None and not by_budget:
        notes.append(
            f"Of the `vram_budget`, {limit} bytes, only {free_bytes} are free on the device, and {FREE_SHARE:.0%} of "
            "these are planned with. `nvidia-smi` shows the programs that hold the others."
        )
    if free_bytes is not None and not by_budget and (limit is not None or len(choices) > 1):
        limit = int(FREE_SHARE * free_bytes)
    fitting = [plan for plan in plans if limit is None or plan.device_bytes <= limit]
    if limit is not None and not fitting:
        least = min(plans, key=lambda plan: plan.device_bytes)
        raise ValueError(_too_small(least, limit, None if by_budget else free_bytes))
    plan = fitting[-1]
    if free_bytes is not None and plan.device_bytes > free_bytes:
        notes.append(f"The plan takes {plan.device_bytes} bytes of the device, of which only {free_bytes} are free.")
    return replace(plan, notes=(*notes, *plan.notes))


def _choices(sizes: ModelSizes, config: StreamingConfig) -> list[Sequence[int]]:
    """The candidate sets of resident layers, from the smallest to the largest."""
    count = len(sizes.layer_bytes)
    if config.residency_mode == "full_resident":
        return [range(count)]
    given = config.keep_first_k is not None or config.keep_last_k is not None
    if config.residency_mode == "full_stream":
        return [()]
    if config.residency_mode == "ffn_only_stream" and not given and config.vram_budget is None:
        return [()]
    if not given:
        return [_spread(sizes.layer_bytes, range(count), kept) for kept in range(count + 1)]
    first, last = config.keep_first_k or 0, config.keep_last_k or 0
    return [[layer for layer in range(count) if layer < first or layer >= count - last]]


def _spread(layer_bytes: Sequence[int], among: Sequence[int], count: int) -> list[int]:
    """The `count` largest layers; of equally large ones an evenly spread subset, beginning with the first."""
    chosen: list[int] = []
    for nbytes in sorted({layer_bytes[layer] for layer in among}, reverse=True):
        equal = [layer for layer in among if layer_bytes[layer] == nbytes]
        taken = min(count - len(chosen), len(equal))
        chosen += [equal[i * len(equal) // taken] for i in range(taken)]
    return sorted(chosen)


def _plan(sizes: ModelSizes, config: StreamingConfig, resident: Sequence[int], *, shared: bool) -> ResidencyPlan:
    layers = range(len(sizes.layer_bytes))
    streamed = [layer for layer in layers if layer not in set(resident)]
    notes: tuple[str, ...] = ()
    if empty := [layer for layer in streamed if not sizes.layer_bytes[layer]]:
        notes = (f"Layers {empty} stay: all of their weights are shared with others.",)
        streamed = [layer for layer in streamed if layer not in empty]
        resident = [layer for layer in layers if layer not in streamed]
    if 0 < len(streamed) <= config.n_staging_slots:
        notes += (f"All layers stay: a slot for each of {len(streamed)} streamed ones would take as much memory.",)
        resident, streamed = layers, []
    in_host = streamed
    if config.disk_folder is not None:
        in_host = [] if shared else _within(sizes.layer_bytes, streamed, config.host_bytes or 0)
    return ResidencyPlan(
        resident=tuple(resident),
        in_host=tuple(in_host),
        on_disk=tuple(layer for layer in streamed if layer not in set(in_host)),
        n_slots=config.n_staging_slots if streamed else 0,
        slot_bytes=max((sizes.layer_bytes[layer] for layer in streamed), default=0),
        sizes=sizes,
        reserved_bytes=config.reserved_bytes,
        host_embeddings=bool(streamed and sizes.embedding_bytes),
        notes=notes,
    )


def _within(layer_bytes: Sequence[int], streamed: Sequence[int], budget: int) -> list[int]:
    """As many streamed layers as fit into a budget."""
    count = nbytes = 0
    for each in sorted((layer_bytes[layer] for layer in streamed), reverse=True):
        nbytes += each
        count += nbytes <= budget
    return _spread(layer_bytes, streamed, count)


def _too_small(least: ResidencyPlan, limit: int, free_bytes: int | None) -> str:
    need = least.device_bytes
    parts = ", ".join(f"{name} {nbytes / 1e9:.2f} GB" for name, nbytes in least._on_device().items() if nbytes)
    settings = "`max_tokens`, `prefill_chunk_size`, `reserved` or `n_staging_slots`"
    remedy = f"Raise `vram_budget`, or lower {settings}."
    if free_bytes is not None:
        remedy = (
            f"That is {FREE_SHARE:.0%} of the {free_bytes} bytes that are free on the device: close other programs "
            f"that use it, which `nvidia-smi` shows, or lower {settings}."
        )
    return (
        f"The budget of the device must be at least {need} bytes ({math.ceil(need / 1e7) / 100:.2f} GB) for this "
        f"model, got {limit}: {parts}. {remedy}"
    )


class Ring:
    """Assigns slots to streamed layers in turn, and starts again with the first layer for the next token.

    Layer `i` always uses slot `i % n_slots`, so that the address of its weights never changes. A free slot goes to the
    layer that uses it next in cyclic order. So no layer is missing when the layers run in order, whatever their
    number. If they do not (an exception, an early exit), `missing` names the layers to copy.

    Args:
        n_layers: Streamed layers.
        n_slots: Slots; no more than layers.
    """

    def __init__(self, n_layers: int, n_slots: int) -> None:
        assert 0 < n_slots <= n_layers
        self.n_layers, self.n_slots = n_layers, n_slots
        self.held: list[int | None] = [None] * n_slots  # the layer whose bytes were last sent to each slot
        self._left: set[int] = set()

    def slot(self, layer: int) -> int:
        """The slot of a layer."""
        return layer % self.n_slots

    def holds(self, layer: int) -> bool:
        """Whether the layer's slot holds its bytes, or will after the copy under way."""
        return self.held[self.slot(layer)] == layer

    def missing(self, layer: int) -> list[int]:
        """The layers to copy if `layer` runs next (`n_layers` stands for the first), the soonest needed first."""
        wanted = sorted((self._next(slot, layer), slot) for slot in range(self.n_slots))
        return [
            (layer + steps) % self.n_layers
            for steps, slot in wanted
            if steps < self.n_layers and self.held[slot] != (layer + steps) % self.n_layers
        ]

    def sent(self, layer: int) -> None:
        """Note that a copy of a layer into its slot was issued."""
        self.held[self.slot(layer)] = layer

    def forget(self, layer: int) -> None:
        """Note that the content of a layer's slot is unknown."""
        self.held[self.slot(layer)] = None

    def leave(self, layer: int) -> None:
        """Stop streaming a layer."""
        self._left.add(layer)
        if self.holds(layer):
            self.forget(layer)

    def join(self, layer: int) -> None:
        """Stream a layer again."""
        self._left.discard(layer)

    def _next(self, slot: int, layer: int) -> int:
        """Steps from `layer` to the next layer that uses `slot`, itself included; n_layers if there is none."""
        for steps in range(self.n_layers):
            found = (layer + steps) % self.n_layers
            if found % self.n_slots == slot and found not in self._left:
                return steps
        return self.n_layers
