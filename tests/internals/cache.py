"""Names of `kvboost_hf.cache`."""

from kvboost_hf.cache import attach as attaching
from kvboost_hf.cache import codecs, costs, reuse, tiers
from kvboost_hf.cache import forward as flow
from kvboost_hf.cache import identity as fingerprint
from kvboost_hf.cache.codecs import Codec, Planes, Role, live_config, make_codec, turboquant
from kvboost_hf.cache.codecs import base as packing
from kvboost_hf.cache.codecs.base import ExactStart, centroids, pack, packed_width, round_to, unpack
from kvboost_hf.cache.codecs.turboquant import TurboQuant, random_projection, random_rotation, rotated, rotated_back
from kvboost_hf.cache.costs import TOKENS_PER_GRAPH, CompileCosts, Graph
from kvboost_hf.cache.forward import (
    _carry,
    admission,
    fill,
    idle,
    loading,
    moved,
    prompt_plan,
    repair_later,
    reused,
    running,
    scatter,
)
from kvboost_hf.cache.forward import moved as moved_forward
from kvboost_hf.cache.forward.admission import blend_reason
from kvboost_hf.cache.forward.ahead import StemReader
from kvboost_hf.cache.forward.head_kv import HeadKV
from kvboost_hf.cache.forward.idle import Idle, _IdleLine, _IdleTurn
from kvboost_hf.cache.forward.loans import Loans, lending_reason, reading_reason
from kvboost_hf.cache.forward.moved import goes_on
from kvboost_hf.cache.forward.reused import Reused
from kvboost_hf.cache.forward.running import CacheParts, Settled
from kvboost_hf.cache.identity import ModelFingerprint, ModelState, ModelWalk, foreign, model_name, walk
from kvboost_hf.cache.identity.foreign import edits_inputs, foreign_functions, holder_of_cache, only_looks
from kvboost_hf.cache.identity.hooks import hooks_of_all_modules
from kvboost_hf.cache.identity.values import Reached, Reader
from kvboost_hf.cache.identity.versions import _SAID_OF_CLASSES, COMPILED_CALL, NOTES, _are_counted, _counts
from kvboost_hf.cache.identity.walk import ModelParts, Walk
from kvboost_hf.cache.identity.weights import (
    Memories,
    WeightsWatch,
    _memory,
    _reads_addresses,
    _SampleInPlace,
    _window,
    plain_tensors,
)
from kvboost_hf.cache.kv import StoredStates, layer_kv
from kvboost_hf.cache.kv.checkpoints import Checkpoints, _short_chunks
from kvboost_hf.cache.kv.layer_kv import RAW, Block, LayerKV, LayerKVReader, are_alike_in_place
from kvboost_hf.cache.kv.layer_states import LayerStates, StateCodes, StateFormat
from kvboost_hf.cache.kv.model_form import ChunkForms, ColumnForm, ColumnFormat, ModelForm, read_kv, read_states
from kvboost_hf.cache.layers import EmptyLayer, IndexedLayer, OpaqueLayer, SparseLayer, make_layers
from kvboost_hf.cache.layers import base as layers
from kvboost_hf.cache.layers.base import ColumnSpec, LayerState, Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import ColumnLayer, ColumnsInTensors, GrowingLayer, SlidingLayer
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor, buffers_for, capacity
from kvboost_hf.cache.layers.hidden_states import HiddenStates
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.layers.quantized import CodedTensor, QuantizedLayer, block_capacity, exact_layers, live_bytes
from kvboost_hf.cache.layers.stateful import (
    HybridLayer,
    HybridSlidingLayer,
    StateLayer,
    view_states,
)
from kvboost_hf.cache.layers.static import StaticReuseLayer, StaticStateLayer
from kvboost_hf.cache.live import Behind, _KeptStates, binding, compiled, decoding_form
from kvboost_hf.cache.live.compiled import StaticDecoding, StepLog, Windows, seen_columns, static_reason
from kvboost_hf.cache.live.decoding_form import NOT_ON_GPU, columns_for, reason_for_eager, reason_of_model
from kvboost_hf.cache.live.ledger import KnownRow, Ledger, copier, offer_content
from kvboost_hf.cache.live.suffix_graph import BaseCall
from kvboost_hf.cache.live.suffix_graph import reason_for_eager as reason_for_eager_suffix
from kvboost_hf.cache.planning import content_index
from kvboost_hf.cache.planning.beginnings import Stem, best_order, find_stems, in_groups, paths_of
from kvboost_hf.cache.planning.chunks import (
    HEAD_TOKENS,
    PIECE,
    Chunker,
    ContentChunker,
    FixedChunker,
    Tokens,
    common_length,
    content_only_key,
    media_ids,
    piece_ends,
    prefix_key,
    root_key,
    shifted_ids,
    states_key,
    text_ids,
    text_key,
    text_of,
    whole_pieces,
)
from kvboost_hf.cache.planning.content_index import ContentIndex, SortedTexts, WindowTable
from kvboost_hf.cache.planning.edits import edited
from kvboost_hf.cache.planning.eviction import EvictionOrder
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS, MovedIndex, find_moved, window_hashes
from kvboost_hf.cache.planning.moved import (
    LAST_TOKENS,
    REPAIRS,
    Measure,
    MovedColumns,
    RepairRow,
    Scores,
    budget,
    choose_columns,
    plan_blend,
)
from kvboost_hf.cache.planning.plan import (
    Border,
    Miss,
    ReusePlan,
    RowPlan,
    Segment,
    cut_off,
    plan_batch,
    plan_row,
    plan_shared,
    trim_row,
)
from kvboost_hf.cache.planning.report import Missed, MissReport, Tally
from kvboost_hf.cache.prompt import (
    LEAVE_KV_ALONE,
    OF_GENERATE,
    OF_MEDIA,
    READ,
    _are_positions_of,
    media,
    read_inputs,
    wants_all_logits,
)
from kvboost_hf.cache.prompt.chats import ChatTemplate
from kvboost_hf.cache.prompt.media import _hash, _split_items, has_types_of_media, read_prompt
from kvboost_hf.cache.prompt.token_log import (
    MaskShape,
    Prompt,
    TokenLog,
    common_shift,
    position_shifts,
    text_positions,
)
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store import history, lower
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put, StoredChunk
from kvboost_hf.cache.store.history import ComputePace, History
from kvboost_hf.cache.store.insertion import StoredText
from kvboost_hf.cache.store.integrity import _by_text, _of_states
from kvboost_hf.cache.store.memory import DeviceMemory, HostMemory
from kvboost_hf.cache.store.settings import chunk_bytes
from kvboost_hf.cache.store.tiered import TieredRecords
from kvboost_hf.cache.tiers import DEFAULT_DISK_BYTES, TierSpec, below, open_tier, open_tiers, parse_tier, record
from kvboost_hf.cache.tiers.base import (
    Entry,
    Failures,
    Guard,
    Kind,
    MadeWith,
    NoticeBoard,
    Tier,
    secrets_in,
    without_secrets,
)
from kvboost_hf.cache.tiers.below import MeasuredTier
from kvboost_hf.cache.tiers.filesystem import FilesystemTier
from kvboost_hf.cache.tiers.record import (
    Blob,
    DamagedBlobError,
    SealedTier,
    dump,
    pack_entry,
    read_entry,
    read_tier_key,
    unpack_entry,
)
from kvboost_hf.cache.tiers.valkey import ValkeyTier, _is_foreign, _member
from kvboost_hf.device_link import Staging
from kvboost_hf.scoring import plan_batches


def records_of(store: ChunkStore) -> TieredRecords:
    """The records behind the verbs of a store."""
    return store._records


def idle_of(cache: ChunkReuseCache) -> Idle:
    """What is done with a cache between its calls."""
    return cache.parts.idle


def bytes_per_column(layer: ReuseLayer) -> int:
    """Bytes of one row's columns for one token."""
    return sum(spec.heads * spec.dim * spec.dtype.itemsize for spec in layer.column_specs)
