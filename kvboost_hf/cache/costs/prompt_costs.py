"""Estimates what a prompt costs to compute on a CPU, and when reuse or storing would cost more.

Without a past, SDPA is told that attention is causal, and leaves out most of what that hides. Behind a past,
transformers gives it a mask: SDPA works through what the mask hides, too, and turns it into numbers in every layer. On
a small model that takes longer than it takes to compute a short beginning again. `kvboost_fa2` has no mask there: it
attends to the past and to the rest apart, and merges both, which takes a little. Costs are counted in operations, not
measured, so that the same prompts are served in the same way each time; they follow what forwards of the embedded
model and of one with 8 layers of 512 take, within a tenth.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from kvboost_hf.cache.kv.records import StoredChunk
from kvboost_hf.cache.planning.plan import RowPlan, Segment, trim_row
from kvboost_hf.compat import bytes_per_token, input_device, layer_configs

PIECE = 512  # tokens in a forward that follows reused ones; where fewer are left, reuse is never given up

# In the operations that a matrix product does meanwhile.
_MASK = 80  # to make an entry of a mask
_MASK_IN_LAYER = 160  # to turn it into a number
_LAYER = 30_000_000  # to launch what there is to do in a layer, however few tokens there are
_MASKED_PAIR = 0.9  # attention of a query to a key beside one in causal attention, half of which is still hidden
_MERGED = 50  # to merge two results of a query's attention, beside its attention to one token
_COPIED_BYTE = 45  # to copy a byte of K/V into memory that was not touched before
_SQUARE = 24  # operations of a layer for a token, in squares of its width, if it is an ordinary one


def pieces(filled: int, limit: int) -> list[int]:
    """Columns at which to begin a new forward.

    In one forward over 1,000 tokens a mask costs more than reusing a tenth of them saves. In pieces, little is hidden.

    Args:
        filled: Columns that are reused.
        limit: Columns behind which logits are wanted.
    """
    return list(range(filled + PIECE, limit - PIECE // 2, PIECE))


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of computing a prompt, in operations.

    Args:
        token: Of a token, attention left out.
        pair: Attention of a token to another one, or to itself.
        layers: How many there are.
    """

    token: int
    pair: int
    layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        """Those of a decoder. Where weights are packed or streamed, its width tells what its parameters do not."""
        layers = layer_configs(model.config)
        squares = sum(config.hidden_size**2 for config in layers)
        heads = sum(_width_of_heads(config) for config in layers)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(max(_SQUARE * squares, 2 * parameters), 4 * heads, len(layers))

    def whole(self, columns: int) -> float:
        """Of a prompt of which nothing is reused."""
        return columns * self.token + columns**2 / 2 * self.pair + self.layers * _LAYER

    def behind(self, filled: int, columns: int) -> float:
        """Of what is left of a prompt behind `filled` columns, in pieces, with SDPA."""
        starts = [filled, *pieces(filled, columns - 1)]
        masked = sum((stop - start) * stop for start, stop in zip(starts, [*starts[1:], columns], strict=True))
        per_entry = _MASKED_PAIR * self.pair + _MASK_IN_LAYER * self.layers + _MASK
        return (columns - filled) * self.token + masked * per_entry + len(starts) * self.layers * _LAYER

    def merged(self, filled: int, columns: int) -> float:
        """Of what is left of a prompt behind `filled` columns, with `kvboost_fa2`."""
        pairs = (columns**2 - filled**2) / 2
        merging = (columns - filled) * _MERGED
        return (columns - filled) * self.token + (pairs + merging) * self.pair + self.layers * _LAYER


def worth_loading(plan: RowPlan, seconds_per_token: float) -> RowPlan:
    """The plan without the end that would take longer to load from lower tiers than to compute."""

    def saving(segment: Segment) -> float:
        assert isinstance(segment.chunk, StoredChunk)
        found, computing = segment.chunk.found, (segment.stop - segment.start) * seconds_per_token
        return computing - (found.tier.seconds_to_read(found.entry.nbytes) if found is not None else 0.0)

    return trim_row(plan, saving)


def stored_per_computed(model: PreTrainedModel) -> int | None:
    """Tokens that take as long to store as one takes to compute; None where nobody waits for it, or it is unknown.

    About ten on the embedded model, and hundreds on one of half a billion parameters.
    """
    nbytes = bytes_per_token(model)
    if input_device(model).type != "cpu" or not nbytes:
        return None
    return Costs.of(model).token // (_COPIED_BYTE * nbytes) + 1


def _width_of_heads(config: Any) -> int:
    """All heads of a layer together."""
    heads, head_dim = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    return heads * head_dim if isinstance(heads, int) and isinstance(head_dim, int) else int(config.hidden_size)
