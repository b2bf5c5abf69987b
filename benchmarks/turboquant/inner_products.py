"""Checks how a codec changes products of queries and keys, and the attention."""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from benchmarks.turboquant.checks import Check, Figures
from benchmarks.turboquant.distortion import DISTORTION, TOLERANCE, as_in_the_paper
from benchmarks.turboquant.heads import LayerHeads
from benchmarks.turboquant.sabotage import controls
from kvboost_hf.cache.codecs import Codec, make_codec
from kvboost_hf.config import KVQuantConfig

# head_dim times the mean squared error of the product of unit vectors, with QJL; after the paper's Theorem 2.
VARIANCE = {2: 0.56, 3: 0.18, 4: 0.047}
_SLOPE_TOLERANCE = 0.05


def inner_product_checks(layers: Sequence[LayerHeads], configs: dict[str, KVQuantConfig]) -> Iterator[Check]:
    """The paper's two forms at 2 to 4 bits; and each codec, of which nothing is claimed."""
    # The products themselves, squared: what a codec that decodes zeros is off by.
    own = fmean(_figures(layer, torch.zeros_like(layer.keys))["variance"] for layer in layers)
    for bits in (2, 3, 4):
        # Rounding alone makes products smaller, by its distortion, and off by as much at random.
        bias = DISTORTION[bits]
        slope, variance = 1 - bias, bias + bias**2 * own
        yield _check(f"<q, k>, MSE, {bits} bits", layers, as_in_the_paper(bits), slope, variance)
        yield _check(f"<q, k>, PROD, {bits} bits", layers, as_in_the_paper(bits, qjl=True), 1.0, VARIANCE[bits])
    for name, config in configs.items():
        yield Check(name=f"<q, k>, {name}", found=_mean(layers, make_codec(config)))


def _check(name: str, layers: Sequence[LayerHeads], config: KVQuantConfig, slope: float, variance: float) -> Check:
    allowed = {
        "slope": (slope - _SLOPE_TOLERANCE, slope + _SLOPE_TOLERANCE),
        "variance": (0.0, TOLERANCE * variance),
    }
    broken = {kind: _mean(layers, codec) for kind, codec in controls(config, "keys").items()}
    claim = f"slope {slope:.2g}, variance {variance:.2g}"
    return Check(name=name, found=_mean(layers, make_codec(config)), allowed=allowed, controls=broken, claim=claim)


def _mean(layers: Sequence[LayerHeads], codec: Codec) -> Figures:
    each = [_figures(layer, layer.through(codec, "keys")) for layer in layers]
    return {name: fmean(figures[name] for figures in each) for name in each[0]}


def _figures(layer: LayerHeads, found: torch.Tensor) -> Figures:
    """`slope` of the products over the true ones, `variance` as in `VARIANCE`, KL of the attention in nats."""
    queries, keys = layer.queries.double(), layer.keys.double()
    true, ours = queries @ keys.mT, queries @ found.double().mT
    lengths = queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(-2)
    off = ((ours - true) / lengths)[lengths > 0]
    later = torch.arange(keys.shape[1], device=keys.device) > layer.positions[:, None]
    p, q = ((x * layer.scale).masked_fill(later, -torch.inf).log_softmax(-1) for x in (true, ours))
    return {
        "slope": float((true * ours).sum() / true.square().sum()),
        "variance": float(keys.shape[-1] * off.square().mean()),
        "KL": float(torch.where(later, 0, p.exp() * (p - q)).sum(-1).mean()),
    }
