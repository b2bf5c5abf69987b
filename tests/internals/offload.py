"""Names of `kvboost_hf.offload`."""

from kvboost_hf.offload import build, checkpoint, disk, quantizer
from kvboost_hf.offload.awq import dispatch, int4pack
from kvboost_hf.offload.awq.cpu import (
    _TILE,
    awq_matmul_torch,
    awq_matmul_transposed_torch,
    scratch_bytes,
    tile_weights,
)
from kvboost_hf.offload.awq.experts import EXPERT_PARTS, AwqExperts
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.awq.int4pack import (
    MOST_TOKENS,
    TILE,
    Int4Packed,
    dense_dtype,
    gemm_qweight,
    int4pack_from_gemm,
    int4pack_matmul,
)
from kvboost_hf.offload.awq.layout import Packed, Stored, dequantize, layout_of, pack, to_gemm, unpack
from kvboost_hf.offload.awq.linear import AwqLinear
from kvboost_hf.offload.awq.matmul import awq_matmul
from kvboost_hf.offload.awq.swap import swap_linears
from kvboost_hf.offload.backends import mapped
from kvboost_hf.offload.backends.base import Backend
from kvboost_hf.offload.backends.choice import use_backend
from kvboost_hf.offload.backends.cuda import CudaBackend
from kvboost_hf.offload.backends.mapped import can_map, map_to_cuda
from kvboost_hf.offload.backends.runtime import CudaRuntime, Event, Stream
from kvboost_hf.offload.backends.threaded import ThreadedBackend
from kvboost_hf.offload.backends.timings import Timings
from kvboost_hf.offload.build import StreamBuilder, _make_portable, streaming_plan
from kvboost_hf.offload.checkpoint import Checkpoint, any_of
from kvboost_hf.offload.disk import FileSource, LayerFolder, Origin
from kvboost_hf.offload.flat import FlatLayout
from kvboost_hf.offload.host import HostMemory, HostSource, Pinning, cuda_pinning
from kvboost_hf.offload.plan import ModelSizes, ResidencyPlan, plan_residency
from kvboost_hf.offload.prune import former_files, prune_layers
from kvboost_hf.offload.simulate import Pass, Successor, next_of_slot, simulate
from kvboost_hf.offload.sizes import CUBLAS_BYTES, activation_bytes, estimate_sizes, sizes_of, what_fits
from kvboost_hf.offload.sources import Source
from kvboost_hf.offload.stream import LayerStream
from kvboost_hf.offload.units import find_units
