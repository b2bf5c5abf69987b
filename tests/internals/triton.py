"""Names of the Triton kernels: importing them fixes whether Triton interprets or compiles."""

from kvboost_hf import gather_kernel
from kvboost_hf import kernels as triton_support
from kvboost_hf.attention.triton import codes, dense, mixed, pieces, tiling
from kvboost_hf.attention.triton import tile as combine_module
from kvboost_hf.attention.triton.halfwords import instructions, load_table, nibbles_of, numbers, unit_of
from kvboost_hf.attention.triton.tile import blocks_of, combine
from kvboost_hf.attention.triton.tiling import MAX_SPLITS, Device, empty_parts, plan_splits
from kvboost_hf.attention.triton.tiling import Tiling as AttentionTiling
from kvboost_hf.attention.triton.tiling import plan_tiling as attention_plan_tiling
from kvboost_hf.gather_kernel import launch as gather_launch
from kvboost_hf.offload.awq import triton_kernels as halfwords
from kvboost_hf.offload.awq import triton_launch as launch_module
from kvboost_hf.offload.awq.tiling import MOST_ROWS, SCRATCH_BYTES, scratch_columns
from kvboost_hf.offload.awq.tiling import ProductTiling as AwqTiling
from kvboost_hf.offload.awq.tiling import plan_tiling as awq_plan_tiling
from kvboost_hf.offload.awq.triton_launch import Planned, awq_matmul_triton, plan_dequantizing, planned, traits_of
from kvboost_hf.triton_launch import LaunchArguments, Launcher
