"""Names of `kvboost_hf.attention`."""

from kvboost_hf.attention import active_tier, backends, kernel_calls, ops, reference, sdpa, use_tier
from kvboost_hf.attention.call import AttentionCall, Part, merge, no_log
from kvboost_hf.attention.cpu import attend as cpu_attend
from kvboost_hf.attention.cpu import codes, dense
from kvboost_hf.attention.cpu.pieces import holders
from kvboost_hf.attention.cuda import can_attend, launch, nvrtc
from kvboost_hf.attention.cuda.launch import Arguments
from kvboost_hf.attention.layer import attention
from kvboost_hf.attention.ops import attend as ops_attend
from kvboost_hf.visibility import Visibility
