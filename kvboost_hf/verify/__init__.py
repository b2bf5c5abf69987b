"""What reuse does to a model's answers, measured on prompts of your own: `verify_correctness`."""

from kvboost_hf.verify.figure import figure
from kvboost_hf.verify.report import ArmResult, CorrectnessReport, PromptResult
from kvboost_hf.verify.run import verify_correctness

__all__ = ["ArmResult", "CorrectnessReport", "PromptResult", "figure", "verify_correctness"]
