"""Schedules which streamed layer is copied into which slot, and when."""


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
