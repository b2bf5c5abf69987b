"""Kernels for CPUs: PyTorch's flash attention on tiles that need no mask of all queries and columns, merged."""

from kvboost_hf.attention.cpu.codes import attend_codes
from kvboost_hf.attention.cpu.dense import attend
from kvboost_hf.attention.cpu.pieces import attend_pieces, can_attend_pieces, can_decode, decode

__all__ = ["attend", "attend_codes", "attend_pieces", "can_attend_pieces", "can_decode", "decode"]
