"""Names of `kvboost_hf.verify`."""

from kvboost_hf.verify import ArmResult, CorrectnessReport, PromptResult, figure
from kvboost_hf.verify.arms import EXACT, FULL, NAIVE, Arm, Coding
from kvboost_hf.verify.measure import Answer, compare
from kvboost_hf.verify.results import highest_share
