"""`validate_turboquant`: the checks of TurboQuant's paper on the K/V of a model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.turboquant.checks import Check, Figures
from benchmarks.turboquant.distortion import distortion_checks
from benchmarks.turboquant.heads import read_heads
from benchmarks.turboquant.inner_products import inner_product_checks
from benchmarks.turboquant.needle import make_needles, needle_checks
from benchmarks.turboquant.sabotage import controls
from kvboost_hf.cache.codecs import config_of, make_codec
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.verify.correctness import GivenPrompt, as_ids, require_plain

CODECS = ("turboquant:4", "turboquant:3.5", "turboquant:3", "turboquant:2")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurboQuantReport:
    """The result of `validate_turboquant`; true if every check passed. Printed, a table and a verdict.

    The column "broken on purpose" has the figures with zeros, with tokens shuffled and with another seed.

    Args:
        model: The class of the model.
        dtype: The dtype of its weights.
        own_queries: Whether queries are the model's own, or drawn at random, as long and as wide as its keys.
        checks: All of them.
    """

    model: str
    dtype: str
    own_queries: bool
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that do not hold, or that a codec that is broken on purpose passes, too."""
        return tuple(check for check in self.checks if not check.passed)

    def __bool__(self) -> bool:
        return not self.failed

    @property
    def verdict(self) -> str:
        """The conclusion, in a sentence or two."""
        judged = [check for check in self.checks if check.allowed]
        broken = sum(len(check.controls) for check in judged)
        undetected = sum(len(check.undetected) for check in judged)
        queries = "the model's own" if self.own_queries else "drawn at random, as long and as wide as the keys"
        said = (
            f"{len(judged) - len(self.failed)} of {len(judged)} checks passed.\n"
            f"Of {broken} runs with codecs that were broken on purpose (zeros, tokens shuffled, another seed),\n"
            f"{broken - undetected} failed, as they should. Queries were {queries}."
        )
        return said + "".join(f"\n{check.name}: {_why(check)}" for check in self.failed)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("check", "figure", "found", "allowed", "broken on purpose", "")]
        lines += [cells for check in self.checks for cells in _lines(check)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*rows, "", self.verdict])

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "ok": bool(self),
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in ("model", "dtype", "own_queries")},
            "checks": [check.as_dict() for check in self.checks],
        }


def validate_turboquant(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[GivenPrompt] | torch.Tensor | None = None,
    codecs: Sequence[str | KVQuantConfig] = CODECS,
    num_tokens: int = 1000,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TurboQuantReport:
    """Rerun the checks of the TurboQuant paper (https://arxiv.org/abs/2504.19874) on a model's own K/V.

    - Distortion of keys and values at 1 to 4 bits, against what the paper proves.
    - Products of queries and keys at 2 to 4 bits, in the paper's two forms: MSE, which makes them smaller, and PROD,
      which does not, but errs more at random.
    - Needles: facts in a long made-up text, found with K/V that has been through a codec.

    Each check is made again with codecs that are broken on purpose: what is decoded are zeros, belongs to other
    tokens, or was encoded with another seed. A check that one of these passes fails.

    Args:
        model: A causal language model in eval mode, not attached.
        tokenizer: The tokenizer of the model.
        prompts: Texts or ids whose K/V is measured, the first 4 of them, up to 1,024 tokens of each; None takes the
            first text with a needle.
        codecs: What is checked besides the paper's forms, as `ChunkStore(codec=...)` takes it. Of KIVI nothing is
            claimed but that it finds needles.
        num_tokens: The number of tokens of the text around a needle.
        depths: Where needles are, from 0, the beginning, to 1.
        seed: The seed of the made-up texts.
        progress: Called with how many steps are done and how many there will be.

    Returns:
        The report.

    Raises:
        ValueError: for what is no codec or prompt, a depth out of range, a model that cannot be served, is in training
            mode or is attached.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> report = validate_turboquant(*load_embedded(), codecs=["turboquant:4"], num_tokens=300, depths=[0.5])
        >>> bool(report)
        True
    """
    require_plain(model)
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"`depths` must be from 0 to 1, and at least one, got {list(depths)}.")
    configs = {
        spec if isinstance(spec, str) else make_codec(spec).name: config
        for spec in codecs
        if (config := config_of(spec)) is not None
    }
    needles = make_needles(tokenizer, num_tokens, depths, seed)
    texts = as_ids(prompts if prompts is not None else [needles[0].ids], tokenizer)[:4]
    done, total = 0, 1 + sum(1 + len(controls(config)) for config in configs.values())

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    read = [read_heads(model, ids[:, :1024]) for ids in texts]
    layers = [layer for found, _ in read for layer in found]
    return TurboQuantReport(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        own_queries=all(own for _, own in read),
        checks=(
            *distortion_checks(layers, configs),
            *inner_product_checks(layers, configs),
            *needle_checks(model, tokenizer, needles, configs, advance),
        ),
    )


def _lines(check: Check) -> list[tuple[str, ...]]:
    """A line for each figure, the first with the name and the outcome: narrow enough for 100 columns."""
    passed = ("ok" if check.passed else "FAILED") if check.allowed else ""
    lines: list[tuple[str, ...]] = []
    for name in (name for name in check.found if name in check.allowed or name not in ("least", "most", "decoded")):
        low, high = check.allowed.get(name, (0.0, 0.0))
        allowed = f"{low:.2g} to {high:.2g}" if name in check.allowed else ""
        broken = ", ".join(f"{found[name]:.2g}" for found in check.controls.values()) if allowed else ""
        ends = ("", "") if lines else (check.name, passed)
        lines.append((ends[0], name, f"{check.found[name]:.2g}", allowed, broken, ends[1]))
    return lines


def _shown(figures: Figures, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {figures[name]:.2g}" for name in names)


def _limits(check: Check) -> str:
    return ", ".join(f"{name} {low:.2g} to {high:.2g}" for name, (low, high) in check.allowed.items())


def _why(check: Check) -> str:
    if not check.holds:
        return f"{_shown(check.found, check.allowed)}, where {_limits(check)} is right"
    return f"it tells nothing, since it is passed with what is broken on purpose, too ({', '.join(check.undetected)})"
