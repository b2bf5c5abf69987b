"""What reuse does to a model's answers, measured on prompts of your own: `verify_correctness`.

What codecs do to its K/V: `validate_turboquant`.
"""

from kvboost_hf.verify.checks import Check
from kvboost_hf.verify.figure import figure
from kvboost_hf.verify.report import CorrectnessReport
from kvboost_hf.verify.results import ArmResult, PromptResult
from kvboost_hf.verify.run import verify_correctness
from kvboost_hf.verify.turboquant import TurboQuantReport, validate_turboquant

__all__ = [
    "ArmResult",
    "Check",
    "CorrectnessReport",
    "PromptResult",
    "TurboQuantReport",
    "figure",
    "validate_turboquant",
    "verify_correctness",
]
