"""Names of `kvboost_hf.offload`."""

from kvboost_hf.device_link import Event, Stream
from kvboost_hf.offload import build, checkpoint, disk
from kvboost_hf.offload import cuda as mapped
from kvboost_hf.offload import load as quantizer
from kvboost_hf.offload.awq import built, int4pack
from kvboost_hf.offload.awq import matmul as dispatch
from kvboost_hf.offload.awq.experts import EXPERT_PARTS, AwqExperts
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.awq.head import Int8Head
from kvboost_hf.offload.awq.int4pack import (
    MOST_TOKENS,
    TILE,
    Int4Packed,
    dense_dtype,
    gemm_qweight,
    int4pack_from_gemm,
    int4pack_matmul,
)
from kvboost_hf.offload.awq.layout import Packed, StoredWeight, dequantize, layout_of, pack, to_gemm, unpack
from kvboost_hf.offload.awq.linear import AwqLinear
from kvboost_hf.offload.awq.matmul import awq_matmul
from kvboost_hf.offload.awq.swap import swap_linears
from kvboost_hf.offload.awq.tiling import (
    _TILE,
    awq_matmul_torch,
    awq_matmul_transposed_torch,
    scratch_bytes,
    tile_weights,
)
from kvboost_hf.offload.backend import LayerBackend, ThreadedBackend, use_backend
from kvboost_hf.offload.build import StreamBuilder, _make_portable, streaming_plan
from kvboost_hf.offload.checkpoint import Checkpoint, any_of
from kvboost_hf.offload.cuda import CudaBackend, Timings, can_map, map_to_cuda
from kvboost_hf.offload.disk import FileSource, LayerFolder, Origin
from kvboost_hf.offload.host import HostSource, LayerMemory, Pinning, cuda_pinning
from kvboost_hf.offload.plan import ModelSizes, ResidencyPlan, Ring, plan_residency
from kvboost_hf.offload.prune import former_files, prune_layers
from kvboost_hf.offload.sizes import CUBLAS_BYTES, activation_bytes, estimate_sizes, sizes_of, what_fits
from kvboost_hf.offload.sources import FlatLayout, Source
from kvboost_hf.offload.stream import LayerStream
from kvboost_hf.offload.units import find_units
