"""Checks the distortion of a codec on the keys and values of a model."""

from collections.abc import Iterator, Sequence
from math import floor, pi
from statistics import fmean

import torch

from benchmarks.turboquant.checks import Check, Figures
from benchmarks.turboquant.heads import LayerHeads
from benchmarks.turboquant.sabotage import controls
from kvboost_hf.cache.codecs import Codec, Role, make_codec
from kvboost_hf.config import KVQuantConfig

# Of N(0, 1), by bits (Max, 1960), which the paper gives as .36, .117, .03 and .009.
DISTORTION = {0: 1.0, 1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
TOLERANCE = 1.25  # one rotation is not the mean over all, and coordinates are not quite normal
ROLES: tuple[Role, Role] = ("keys", "values")


def claimed(bits: float) -> float:
    """The distortion to be expected; between whole bits, that of some coordinates with one more than the others."""
    more = bits - floor(bits)
    return (1 - more) * DISTORTION[floor(bits)] + (more and more * DISTORTION[floor(bits) + 1])


def as_in_the_paper(bits: float, *, qjl: bool = False) -> KVQuantConfig:
    """TurboQuant without what is not in the paper."""
    return KVQuantConfig(key_bits=bits, value_bits=bits, qjl=qjl, remove_key_mean=False, norm_correction=False)


def distortion_checks(layers: Sequence[LayerHeads], configs: dict[str, KVQuantConfig]) -> Iterator[Check]:
    """Keys and values at 1 to 4 bits as in the paper, and by each codec."""
    for role in ROLES:
        for bits in (1, 2, 3, 4):
            claim = f"{claimed(bits):.2g}; of any method: {4.0**-bits:.2g}"
            yield _check(f"distortion of {role}, {bits} bits", layers, as_in_the_paper(bits), role, claim)
    for name, config in configs.items():
        for role in ROLES:
            yield _check(f"distortion of {role}, {name}", layers, config, role, "")


def _check(name: str, layers: Sequence[LayerHeads], config: KVQuantConfig, role: Role, claim: str) -> Check:
    bits = config.key_bits if role == "keys" else config.value_bits
    allowed: dict[str, tuple[float, float]] = {}
    if config.method == "turboquant" and not (role == "values" and config.grouped_values):
        # The signs of QJL are there for products. The vector that they make is further off than one without them.
        most = pi / 2 * claimed(bits - 1) if role == "keys" and config.qjl else claimed(bits)
        allowed = {"error": (0.0, TOLERANCE * most)}
    broken = {kind: _figures(layers, codec, role) for kind, codec in controls(config).items()} if allowed else {}
    return Check(
        name=name, found=_figures(layers, make_codec(config), role), allowed=allowed, controls=broken, claim=claim
    )


def _figures(layers: Sequence[LayerHeads], codec: Codec, role: Role) -> Figures:
    errors = [_error(layer.through(codec, role), getattr(layer, role)) for layer in layers]
    return {"error": fmean(errors), "least": min(errors), "most": max(errors)}


def _error(found: torch.Tensor, x: torch.Tensor) -> float:
    """‖found - x‖² / ‖x‖², the mean over vectors that are not zero."""
    squares = x.double().square().sum(-1)
    return float(((found.double() - x.double()).square().sum(-1) / squares)[squares > 0].mean())
