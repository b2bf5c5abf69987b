"""A layer of codes as a state machine, against one that keeps everything and encodes each block on its own."""

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvboost_hf.config import KVQuantConfig
from tests.internals.cache import QuantizedLayer, make_codec

HEADS, DIM = 2, 16
CONFIGS = [
    KVQuantConfig(method="kivi", key_bits=2, value_bits=4, group_size=16, sink_tokens=2, window=16),
    KVQuantConfig(key_bits=3, value_bits=2, sink_tokens=0, window=16),
]
lengths = st.integers(1, 50)


@dataclass
class Plain:
    """The columns as they were given, and which of them are blocks: [start, stop), and where their codes would end."""

    config: KVQuantConfig
    sinks: int
    keys: torch.Tensor  # [batch, heads, columns, dim]; the values are the same
    blocks: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)  # of each the keys that were encoded

    def append(self, new: torch.Tensor) -> None:
        for column in new.split(1, dim=2):
            self.keys = torch.cat([self.keys, column], dim=2)
            at = self.blocks[-1][1] if self.blocks else self.sinks
            if self.keys.shape[2] - at == 2 * self.config.window:
                end = at + self.config.window
                self.blocks.append((at, end, self.keys[:, :, at:end]))

    def truncate(self, length: int) -> None:
        self.keys = self.keys[:, :, :length]
        self.blocks = [(at, min(end, length), keys) for at, end, keys in self.blocks if at < length]

    def select(self, rows: torch.Tensor) -> None:
        self.keys = self.keys[rows]
        self.blocks = [(at, end, keys[rows]) for at, end, keys in self.blocks]

    def copy(self) -> "Plain":
        return Plain(self.config, self.sinks, self.keys, list(self.blocks))

    def read(self, tensor: int) -> torch.Tensor:
        codec, role = make_codec(self.config), ("keys", "values")[tensor]
        out = self.keys.clone()
        for at, end, keys in self.blocks:
            for row in range(len(keys)):
                planes = codec.encode(keys[row : row + 1].contiguous(), role, [None])  # type: ignore[arg-type]
                alone = {name: plane[0] for name, plane in planes.items()}
                block = codec.decode(alone, (HEADS, keys.shape[2], DIM), keys.dtype, role, None)  # type: ignore[arg-type]
                out[row, :, at:end] = block[:, : end - at]
        return out


@dataclass
class Pair:
    layer: QuantizedLayer
    plain: Plain


class LiveQuantMachine(RuleBasedStateMachine):
    """Layers that share buffers with one another, each beside its plain twin."""

    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.known: list[Pair] = []

    def columns(self, batch: int, n: int) -> torch.Tensor:
        self.seed += 1
        x = torch.randn(batch, HEADS, n, DIM, generator=torch.Generator().manual_seed(self.seed))
        x[..., 3] += 7  # an outlier
        return x

    @initialize(config=st.sampled_from(CONFIGS), padding=st.sampled_from([0, 0, 20]), batch=st.integers(1, 3))
    def begin(self, config: KVQuantConfig, padding: int, batch: int) -> None:
        self.config = config
        layer = QuantizedLayer(make_codec(config), config, None)
        layer.expect_padding(padding)
        self.known.append(Pair(layer, Plain(config, padding + config.sink_tokens, self.columns(batch, 0))))

    def pick(self, data: Any) -> Pair:
        return data.draw(st.sampled_from(self.known))

    @rule(data=st.data(), n=lengths)
    def append(self, data: Any, n: int) -> None:
        pair = self.pick(data)
        before, new = pair.plain.read(0), self.columns(len(pair.plain.keys), n)
        keys, values = pair.layer.update(new, new)
        pair.plain.append(new)
        assert torch.equal(keys, torch.cat([before, new], dim=2))
        assert torch.equal(values[:, :, -n:], new)

    @rule(data=st.data(), n=lengths)
    def append_one_by_one(self, data: Any, n: int) -> None:
        pair = self.pick(data)
        new = self.columns(len(pair.plain.keys), n)
        for column in new.split(1, dim=2):
            pair.layer.update(column, column)
        pair.plain.append(new)

    @rule(data=st.data(), n=lengths)
    def fill(self, data: Any, n: int) -> None:
        pair = self.pick(data)
        new = self.columns(len(pair.plain.keys), n)
        held = pair.layer.length
        cut = data.draw(st.integers(0, n))
        pieces = [[(row[:, :cut], row[:, :cut]), (row[:, cut:], row[:, cut:])] for row in new]
        pair.layer.fill(held, held + n, pieces)
        pair.plain.append(new)

    @rule(data=st.data(), n=st.integers(0, 60))
    def crop(self, data: Any, n: int) -> None:
        pair = self.pick(data)
        pair.layer.crop(-n)
        pair.plain.truncate(max(0, pair.plain.keys.shape[2] - n))

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        pair = self.pick(data)
        batch = len(pair.plain.keys)
        rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3)))
        if pair.layer.is_initialized:
            pair.layer.batch_select_indices(rows)
            pair.plain.select(rows)

    @rule(data=st.data())
    def share(self, data: Any) -> None:
        pair = self.pick(data)
        if len(self.known) < 3:
            self.known.append(Pair(pair.layer.share(), pair.plain.copy()))

    @rule(data=st.data())
    def reset(self, data: Any) -> None:
        pair = self.pick(data)
        pair.layer.reset()
        pair.plain = Plain(self.config, self.config.sink_tokens, self.columns(len(pair.plain.keys), 0))

    @invariant()
    def layers_hold_what_their_twins_do(self) -> None:
        for pair in self.known:
            length = pair.plain.keys.shape[2]
            assert pair.layer.length == pair.layer.get_seq_length() == length
            for row in range(len(pair.plain.keys) if pair.layer.is_initialized and length else 0):
                found = pair.layer.columns(row, 0, length)
                assert found is not None
                for tensor in (0, 1):
                    assert torch.equal(found[tensor], pair.plain.read(tensor)[row])


TestLiveQuant = LiveQuantMachine.TestCase
TestLiveQuant.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
