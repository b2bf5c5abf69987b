"""Names of `kvboost_hf.assisted`."""

from kvboost_hf.assisted import branches
from kvboost_hf.assisted.branch_probe import branch_reason
from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.growth import Calibration, Growth
from kvboost_hf.assisted.host_reads import HostReads
from kvboost_hf.assisted.lookup import LookupAssistant
from kvboost_hf.assisted.pauses import learned_positions
from kvboost_hf.assisted.schedule import Adaptive, ConfidentLength, Constant, DraftLength, Heuristic
from kvboost_hf.assisted.tree import ROOT, Tree, as_bits, depths, lineage
from kvboost_hf.assisted.tree_draft import TreeDraft
