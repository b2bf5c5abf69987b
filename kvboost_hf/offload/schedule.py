"""Which streamed layer goes into which slot, and when: pure Python, no tensors."""


class Ring:
    """Streamed layers that take slots in turn, and start again with the first for the next token.

    Layer `i` always takes slot `i % n_slots`, so that its weights never change their address. A slot that gets free is
    given to the layer that takes it next in the order of layers, the first ones following the last ones; so no layer
    is missing when the layers run in order, however many they are. Where they do not (an exception, an early exit),
    what is missing is told when it is asked for.

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
        """The slot that a layer takes."""
        return layer % self.n_slots

    def holds(self, layer: int) -> bool:
        """Whether its slot was last given to this layer."""
        return self.held[self.slot(layer)] == layer

    def missing(self, layer: int) -> list[int]:
        """Layers to send into slots if `layer` is the next to run (`n_layers` stands for the first), soonest first."""
        wanted = sorted((self._next(slot, layer), slot) for slot in range(self.n_slots))
        return [
            (layer + steps) % self.n_layers
            for steps, slot in wanted
            if steps < self.n_layers and self.held[slot] != (layer + steps) % self.n_layers
        ]

    def sent(self, layer: int) -> None:
        """The bytes of a layer are on their way into its slot."""
        self.held[self.slot(layer)] = layer

    def forget(self, layer: int) -> None:
        """What a layer's slot holds is not known any more."""
        self.held[self.slot(layer)] = None

    def leave(self, layer: int) -> None:
        """A layer is not streamed any more."""
        self._left.add(layer)
        if self.holds(layer):
            self.forget(layer)

    def join(self, layer: int) -> None:
        """It is again."""
        self._left.discard(layer)

    def _next(self, slot: int, layer: int) -> int:
        """Steps from `layer` to the first layer from there on that takes `slot`; n_layers if there is none."""
        for steps in range(self.n_layers):
            found = (layer + steps) % self.n_layers
            if found % self.n_slots == slot and found not in self._left:
                return steps
        return self.n_layers
