"""Measures how reuse, and K/V in fewer bits, change a model's answers to your prompts: `verify_correctness`."""

from kvboost_hf.verify.correctness import verify_correctness
from kvboost_hf.verify.report import CorrectnessReport, figure
from kvboost_hf.verify.results import ArmResult, PromptResult

__all__ = [
    "ArmResult",
    "CorrectnessReport",
    "PromptResult",
    "figure",
    "verify_correctness",
]
