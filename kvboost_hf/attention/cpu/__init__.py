"""On a CPU: PyTorch's flash attention, in parts that need no mask of all queries and columns, merged."""

from kvboost_hf.attention.cpu.codes import attend_codes
from kvboost_hf.attention.cpu.dense import attend

__all__ = ["attend", "attend_codes"]
