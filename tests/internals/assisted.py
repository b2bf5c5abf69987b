"""Names of `kvboost_hf.assisted`."""

from kvboost_hf.assisted import branches, eagle_drafts
from kvboost_hf.assisted import heads as head_kinds
from kvboost_hf.assisted.branches import Branches, branch_reason
from kvboost_hf.assisted.chains import drafting_reason
from kvboost_hf.assisted.columns import Account, PassTimes
from kvboost_hf.assisted.draft import HostReads
from kvboost_hf.assisted.eagle import EagleHeads, KeysValues
from kvboost_hf.assisted.eagle_drafts import EagleSource
from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.learner import Calibration
from kvboost_hf.assisted.limits import learned_positions
from kvboost_hf.assisted.lookup import LookupAssistant, LookupDraft
from kvboost_hf.assisted.rounds import TreeDraft
from kvboost_hf.assisted.schedule import Adaptive, ConfidentLength, Constant, DraftLength, Heuristic
from kvboost_hf.assisted.tree import ROOT, Growth, Tree, as_bits, depths, lineage
