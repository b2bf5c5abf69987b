"""Names of `kvboost_hf.verify`."""

from kvboost_hf.verify import ArmResult, CorrectnessReport, PromptResult, figure
from kvboost_hf.verify.arms import EXACT, FULL, NAIVE, Coding, ComparedArm, named_policies
from kvboost_hf.verify.measure import Call, compare
from kvboost_hf.verify.results import highest_share
