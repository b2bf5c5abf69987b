"""Settings: frozen dataclasses that check their values at construction."""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from kvboost_hf.fields import check_bounds, setting
from kvboost_hf.old_names import refuse

ReuseMode = Literal["exact", "blend"]
Repair = Literal["auto", "query", "cacheblend", "first_k", "selective", "none"]
WeightsCheck = Literal["sample", "full"]
QuantMethod = Literal["turboquant", "kivi"]
Rotation = Literal["hadamard", "haar"]
ResidencyMode = Literal["partial_resident", "full_resident", "ffn_only_stream", "full_stream"]
QuantKernel = Literal["auto", "triton", "torch"]
HeadBits = Literal[8]
DraftPolicy = Literal["auto", "tree", "chain"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i)?B?|B)", re.IGNORECASE)


def parse_size(text: str) -> int | None:
    """The bytes of a size such as `"8GB"` or `"8G"` (10^9), or `"7.5GiB"` or `"7.5Gi"` (2^30); None for other text.

    Example:
        >>> parse_size("7.5GiB"), parse_size("500 MB"), parse_size("8g"), parse_size("8")
        (8053063680, 500000000, 8000000000, None)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper())) or None


def _size(text: str) -> int | str:
    """A number of bytes, or a text with a unit as it was typed, for it is shown again."""
    return int(text) if text.isdecimal() else text


STREAMED, PLANNED, DRAFTS = "a model larger than its device", "what is planned for", "drafts"  # groups of flags
Progressive = bool | int | Literal["ride"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePolicy:
    """How stored K/V may be used.

    Args:
        mode: `"exact"` uses K/V only if tokens, positions and history are all the same, so that the output is that of
            plain `generate()`. `"blend"` also uses K/V of the same tokens at other positions: keys are rotated to the
            new positions, and some of the tokens are computed again. The output may differ; `verify_correctness`
            measures how much.
        repair: With `"blend"`, how the tokens to compute again before the first new token are chosen. `"query"`: those
            that the end of the prompt attends to, near a seam above all. `"cacheblend"`: those whose values differ
            most from the stored ones in an early layer (Yao et al., EuroSys 2025, https://arxiv.org/abs/2405.16444).
            `"first_k"`: those after each seam, as many as `recompute_ratio` allows (Hu et al.,
            https://arxiv.org/abs/2410.15332). `"selective"`: `seam_tokens` after each seam. `"none"`: none.
            `"auto"`: `"cacheblend"` for models of up to 8 layers, `"query"` for others.
        recompute_ratio: Share of the moved tokens to compute again before the first new token, from 0 to 1. None is
            0.15 of those behind each seam, but no more than 64: behind an edit, little changes far from it. At 1 all
            are, and the output is that of plain `generate()`. Not used by `"selective"` and `"none"`.
        max_recompute_ratio: The ratio is raised up to this one, until the chosen tokens have `min_coverage` of the
            total that the repair measures (attention, or deviation). None never raises it.
        min_coverage: The share for `max_recompute_ratio`, from 0 to 1.
        seam_tokens: Tokens after each seam, for `"selective"`.
        sink_tokens: The first tokens of a prompt, attention sinks, which are always computed.
        overlap_k: The last tokens before each seam, which every repair computes again.
        min_prefill_saving: Reuse that needs an extra forward (over the rows of a batch with a shorter stored prefix
            than others, or over what several rows begin with), or that moves chunks, must save at least this many
            tokens. With 0, chunks are moved even if
            that saves nothing, and a short prefix is reused even if the mask that attention then needs on a CPU costs
            more than computing it; and all prompts are stored, even if hardly any comes again.
        weights_check: How changed weights are detected before each prompt. `"sample"` compares PyTorch's versions,
            weights whose `data` was accessed, and about 32 values of each other tensor. `"full"` reads every weight,
            for code that edits a few values in other ways (docs/reuse.md names them). K/V stored with one is not found
            with the other.
        audit_rate: Share of the reused prompts, from 0 to 1, that are also computed whole, to compare the answers. If
            they differ, the plain answer is returned, the stored chunks that differ are no longer used, and `stats()`,
            the report and the log say so. An audit costs as much as reuse saves.
        progressive: With `"blend"`, how the repair goes on after the first token: everything from the first moved
            token on is computed again, in order, until all K/V is that of plain `generate()`. Then later tokens and
            turns are exact, and the prompt is stored as if it had been computed whole. `True`: before the second
            token, which costs what moving has saved, a token later; of more than 2,048 tokens, as many or a third of
            them before each of the next ones. A number: so many tokens in the forward of each new token, and the rest
            when the call has ended, in a thread of its own, which leaves off when the model or the cache is used
            again. `"ride"`: the same, with as many tokens as a forward takes at hardly more cost, which is measured
            once: many on a GPU, none on most CPUs. `False`: never. None is `"ride"` where moved text has a seam every
            1,024 tokens or more often, as documents in another order have, and `False` where it has fewer, as behind
            an edit: K/V changes most near a seam. `ChunkReuseCache.repair` does all of it at once. Not where layers
            with a sliding window have let go of tokens, where an image came behind moved text, or where drafts branch.
        keep_logprobs: Keep the last hidden states of all tokens beside their K/V (`hidden_size` numbers a token), so
            that calls which want the logits of all tokens, or a loss, reuse as others do: the head of the model
            computes the logits of reused tokens from them. K/V stored with it is not found without it. Not with mode
            `"blend"`, `live_quant` or `max_cache_len`.
        keep_hidden_states: The layers whose hidden states are kept beside K/V, by their numbers in what
            `output_hidden_states` returns: `hidden_size` numbers a token for each. None keeps, of each text, those
            that a call asks for (`output_hidden_states`, `use_mtp=True`, `speculation_type="dflash"`), so that later
            calls with its prompt reuse it. -1 (the last ones), a tuple of numbers, or True (all) keeps them of all
            texts. False keeps none: a prompt whose hidden states are asked for is computed whole. -1, a tuple and True
            not with mode `"blend"`, `live_quant` or `max_cache_len`.
        reproducible: Compute every prompt in pieces of 256 tokens, counted from its first token, and reuse whole
            pieces only. Then the logits of a prompt of one row are the same bit by bit, in any dtype, whether none,
            some or all of it is reused. Tokens of an answer are computed again when they come back in a prompt.
            Several rows, padding, images and models with states are not reused. K/V stored with it is not found
            without it. Not with mode `"blend"`, `live_quant`, `max_cache_len` or a lossy codec.

    Raises:
        ValueError: for an unknown mode, repair or check, a repair with mode `"exact"`, a negative count, a ratio or
            rate outside 0 to 1, a maximum below its ratio, layers that are no numbers, or audits, `keep_logprobs`,
            `keep_hidden_states` or `reproducible` with mode `"blend"`, whose answers differ by design.
    """

    mode: ReuseMode = setting("exact")
    repair: Repair = setting("auto")
    recompute_ratio: float | None = setting(None, least=0, most=1)
    max_recompute_ratio: float | None = setting(None, least=0, most=1)
    min_coverage: float = setting(0.9, least=0, most=1)
    seam_tokens: int = setting(16, least=0)
    sink_tokens: int = setting(16, least=0)
    overlap_k: int = setting(0, least=0)
    min_prefill_saving: int = setting(64, least=0)
    weights_check: WeightsCheck = setting("sample")
    audit_rate: float = setting(0.0, least=0, most=1)
    progressive: Progressive | None = None
    keep_logprobs: bool = setting(False)
    keep_hidden_states: bool | int | tuple[int, ...] | None = None
    reproducible: bool = setting(False)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_recompute_ratio is not None and self.recompute_ratio is not None:
            if self.max_recompute_ratio < self.recompute_ratio:
                raise ValueError(
                    f"`max_recompute_ratio` must be at least `recompute_ratio` ({self.recompute_ratio}), got "
                    f"{self.max_recompute_ratio}. Pass None to keep the ratio fixed."
                )
        if self.mode == "exact" and self.repair != "auto":
            raise ValueError(
                f"`repair` must be left out with mode 'exact', which moves nothing, got {self.repair!r}. Pass "
                f"ReusePolicy(mode='blend', repair={self.repair!r})."
            )
        if self.mode == "blend" and self.audit_rate:
            raise ValueError(
                f"`audit_rate` must be 0 with mode 'blend', whose answers may differ, got {self.audit_rate}. "
                "Measure them with verify_correctness()."
            )
        _require_layers(self.keep_hidden_states)
        _require_progressive(self.progressive)
        for name in ("keep_logprobs", "keep_hidden_states"):
            if self.mode == "blend" and getattr(self, name):
                raise ValueError(
                    f"`{name}` must be False with mode 'blend', got {getattr(self, name)!r}: hidden states of moved "
                    "tokens are not those of the prompt. Use mode 'exact'."
                )
        if self.mode == "blend" and self.reproducible:
            raise ValueError(
                "`reproducible` must be False with mode 'blend', got True: answers depend on what is stored. Use mode "
                "'exact'."
            )


class RecomputeStrategy(StrEnum):
    """How chunks that are found elsewhere in other prompts are repaired: `ReusePolicy.repair` by these names."""

    AUTO = "auto"  # what suits the depth of the model
    SELECTIVE = "selective"  # `recompute_overlap` tokens after each seam
    CACHEBLEND = "cacheblend"  # the tokens that differ most
    QUERY = "query"  # those that the end of the prompt attends to, near seams above all
    FIRST_K = "first_k"  # those after each seam
    NONE = "none"  # not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class KVQuantConfig:
    """How K/V is quantized.

    Args:
        method: `"turboquant"`: each vector is rotated at random and its coordinates are rounded to a Lloyd-Max
            codebook (Zandieh et al., https://arxiv.org/abs/2504.19874). `"kivi"`: rounded to even steps between the
            least and the largest of a group, keys per channel, values per token (Liu et al., ICML 2024,
            https://arxiv.org/abs/2402.02750).
        key_bits: Average bits of a key's coordinate, scales not counted; with `"turboquant"` from 1 to 4, with
            `"kivi"` 2, 4 or 8. A fraction, such as 3.5, gives some coordinates one bit more than others.
        value_bits: The same for values.
        group_size: With `"kivi"`, tokens that share a scale of a key's channel, and coordinates of a value that share
            one. A multiple of 16.
        rotation: With `"turboquant"`, a randomized Hadamard transform, or a rotation drawn from the Haar measure.
        qjl: With `"turboquant"`, spend the last bit of keys, which have 2 or more, on the signs of a random projection
            of what is left, for unbiased inner products, as in the paper. Its variance is several times that of the
            bit spent otherwise.
        remove_key_mean: With `"turboquant"`, keep the mean of the keys apart. Where keys are rotated by their
            position, that is the mean of the keys before it.
        norm_correction: With `"turboquant"`, scale what is decoded to the length that was encoded; not keys with
            `qjl`, which are unbiased without it.
        grouped_values: With `"turboquant"`, keep values as `"kivi"` does, with 2 or 4 bits.
        seed: The seed of the rotation.
        sink_tokens: The first tokens of a prompt, which stay exact, in a store and in a live cache.
        window: Last tokens of a live cache that stay exact: at least so many, and at most twice as many. A multiple
            of 16.
        exact_layers: So many first and so many last layers stay exact, but no more than a quarter of all at either
            end.

    Raises:
        ValueError: for an unknown method or rotation, bits that the method does not support, or an invalid size.
    """

    method: QuantMethod = setting("turboquant")
    key_bits: float = 4
    value_bits: float = 4
    group_size: int = 64
    rotation: Rotation = setting("hadamard")
    qjl: bool = setting(False)
    remove_key_mean: bool = setting(True)
    norm_correction: bool = setting(True)
    grouped_values: bool = setting(False)
    seed: int = setting(0, least=0)
    sink_tokens: int = setting(4, least=0)
    window: int = 128
    exact_layers: int = setting(2, least=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("key_bits", "value_bits"):
            self._require_bits(name, getattr(self, name))
        for name in ("group_size", "window"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size <= 0 or size % 16:
                raise ValueError(f"`{name}` must be a positive multiple of 16, got {size!r}.")

    def _require_bits(self, name: str, bits: object) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int | float):
            raise ValueError(f"`{name}` must be a number, got {bits!r}.")
        if self.method == "kivi" and bits not in (2, 4, 8):
            raise ValueError(f"`{name}` must be 2, 4 or 8 with method 'kivi', got {bits!r}.")
        if self.method == "turboquant" and not 1 <= bits <= 4:
            raise ValueError(f"`{name}` must be from 1 to 4 with method 'turboquant', got {bits!r}.")
        if self.method == "turboquant" and name == "key_bits" and self.qjl and bits < 2:
            raise ValueError(f"`key_bits` must be 2 or more with `qjl`, which spends one on signs, got {bits!r}.")
        if self.method == "turboquant" and name == "value_bits" and self.grouped_values and bits not in (2, 4):
            raise ValueError(f"`value_bits` must be 2 or 4 with `grouped_values`, got {bits!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingConfig:
    """Which layers of a model stay on its device, and how the others are streamed to it.

    Args:
        residency_mode: `"partial_resident"`: some layers stay, chosen by `keep_first_k` and `keep_last_k` or by
            `vram_budget`. `"full_resident"`: all do, and nothing is streamed. `"ffn_only_stream"`: attention and norms
            of all layers stay, feed-forward parts are streamed but for those that stay, chosen likewise.
            `"full_stream"`: none stays.
        keep_first_k: So many first layers stay; with `"ffn_only_stream"` as a whole. Not with `vram_budget`.
        keep_last_k: So many last layers.
        vram_budget: Memory of the device that the model may take, with K/V and activations: bytes, or text such as
            `"8GB"` or `"8G"` (10^9), or `"7.5GiB"` or `"7.5Gi"` (2^30). As many layers stay as fit. Without it, and
            without `keep_first_k` and `keep_last_k`, nine tenths of the memory that is free when the model is loaded.
        n_staging_slots: Slots on the device that streamed layers share in turn; 2 or more.
        quant_kernel: The kernel that multiplies by 4-bit weights. `"auto"` takes Triton's on a GPU. On a CPU it takes
            an operator that is built once with the machine's C++ compiler and rounds inputs to 16 bits in each group;
            without a compiler PyTorch's 4-bit product, which rounds inputs and results to bfloat16. `"torch"` takes
            float32 operations of PyTorch on any device: exact in float32, and slower. `"triton"` takes Triton's or
            raises an error.
        head_bits: 8 to round the weights of the output head to 8 bits, on a CPU with a C++ compiler: each token reads
            half as much of it, and logits change a little. None leaves the head as the checkpoint has it.
        host_embeddings: If layers are streamed, leave the input embeddings in pinned host memory, unless they are also
            the head: a GPU reads the few rows that it needs from there. Needs `pin_memory`.
        pin_memory: Keep host memory from being paged out, so that copies run while the model computes.
        host_budget: Host memory that streamed layers may take, given as `vram_budget`; the others stay in files in
            `disk_folder`.
        disk_folder: A folder for files of the streamed layers that `host_budget` has no room for, or of all without a
            `host_budget`. Models and processes may share it; `kvboost-hf prune` removes what nobody uses.
        max_tokens: Tokens in the context, of all sequences together, that a budget makes room for.
        prefill_chunk_size: The most tokens of one forward that a budget makes room for, as you pass it to
            `generate()`; None for a prompt of `max_tokens` at once.
        reserved: Memory of the device that a budget leaves free, such as for a draft model; given as `vram_budget`.

    Raises:
        ValueError: for an unknown mode or kernel, an invalid count or size, a budget together with layers to keep,
            layers to keep if all or none stay, an empty name of a folder, or a host budget without a folder.
    """

    residency_mode: ResidencyMode = setting(
        "partial_resident",
        group=STREAMED,
        flag=("streaming-mode", "residency-mode"),
        metavar="MODE",
        help=f"{', '.join(get_args(ResidencyMode))} (default: partial_resident)",
    )
    keep_first_k: int | None = setting(None, group=STREAMED, metavar="LAYERS", least=0)
    keep_last_k: int | None = setting(None, group=STREAMED, metavar="LAYERS", least=0)
    vram_budget: int | str | None = setting(
        None,
        group=(STREAMED, PLANNED),
        metavar="SIZE",
        parse=_size,
        help="device memory that the model may take, such as 8GB or 7.5GiB: as many layers stay as fit",
    )
    n_staging_slots: int = setting(2, group=STREAMED, metavar="SLOTS", least=2)
    quant_kernel: QuantKernel = setting("auto")
    head_bits: HeadBits | None = setting(None)
    host_embeddings: bool = setting(True)
    pin_memory: bool = setting(True)
    host_budget: int | str | None = setting(None, group=STREAMED, metavar="SIZE", parse=_size)
    disk_folder: str | None = setting(None, group=(STREAMED, PLANNED), metavar="FOLDER")
    max_tokens: int = setting(4096, group=PLANNED, least=1)
    prefill_chunk_size: int | None = setting(None, group=PLANNED, metavar="TOKENS", least=1)
    reserved: int | str = 0

    if not TYPE_CHECKING:

        def __new__(cls, **fields: Any) -> Self:
            """Refuse the fields that only the kvboost package has."""
            refuse("StreamingConfig", fields)
            return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.quant_kernel in ("marlin", "exllama_v2"):
            raise ValueError(
                f"`quant_kernel` must be one of {get_args(QuantKernel)}, got {self.quant_kernel!r}, which repacks "
                "weights when it loads them and cannot read streamed ones. Pass 'auto'."
            )
        if self.disk_folder is not None:
            if not isinstance(self.disk_folder, str | os.PathLike) or not str(self.disk_folder).strip():
                raise ValueError(
                    f"`disk_folder` must name a folder or be None, got {self.disk_folder!r}. Pass '.' for this one."
                )
            object.__setattr__(self, "disk_folder", str(self.disk_folder))
        check_bounds(self)
        for name in ("keep_first_k", "keep_last_k"):
            if (kept := getattr(self, name)) is None:
                continue
            if self.vram_budget is not None:
                raise ValueError(
                    f"`{name}` must be None with a `vram_budget`, which chooses the layers that stay, got {kept}. "
                    "Pass one of the two."
                )
            if self.residency_mode in ("full_resident", "full_stream"):
                raise ValueError(
                    f"`{name}` must be None with residency_mode {self.residency_mode!r}, got {kept}. Pass "
                    "'partial_resident' to choose layers."
                )
        for name in ("vram_budget", "host_budget"):
            if getattr(self, name) is not None:
                require_size(name, getattr(self, name), least=1)
        require_size("reserved", self.reserved, least=0)
        if self.host_budget is not None and self.disk_folder is None:
            raise ValueError(
                f"`host_budget` must be None without a `disk_folder` for what does not fit, got {self.host_budget!r}. "
                "Pass a folder."
            )

    @property
    def forward_tokens(self) -> int:
        """The most tokens of one forward."""
        return min(self.max_tokens, self.prefill_chunk_size or self.max_tokens)

    @property
    def vram_bytes(self) -> int | None:
        """`vram_budget` in bytes."""
        return None if self.vram_budget is None else require_size("vram_budget", self.vram_budget, least=1)

    @property
    def host_bytes(self) -> int | None:
        """`host_budget` in bytes."""
        return None if self.host_budget is None else require_size("host_budget", self.host_budget, least=1)

    @property
    def reserved_bytes(self) -> int:
        """`reserved` in bytes."""
        return require_size("reserved", self.reserved, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTreeConfig:
    """The size of the trees of tokens that a draft model proposes.

    Args:
        policy: `"auto"`: depth and number of tokens follow from the acceptance and the times measured so far; if a
            draft is nearly certain, or verifying a token is slow, the tree is a chain. `"tree"`: always as large as
            the other settings allow. `"chain"`: as `"auto"`, but with one child per token.
        branching: The most children of a token.
        width: The most tokens of a level that the draft continues; it computes them in one pass.
        depth: The most levels.
        max_nodes: The most tokens that one pass of the target verifies. Up to 63 need no dense mask with
            `kvboost_fa2`.

    Raises:
        ValueError: for an unknown policy, or numbers that are not positive.
    """

    policy: DraftPolicy = setting("auto")
    branching: int = setting(8, group=DRAFTS, flag="speculative-tree-max-branching", least=1)
    width: int = setting(8, least=1)
    depth: int = setting(24, group=DRAFTS, flag="speculative-tree-max-depth", least=1)
    max_nodes: int = setting(63, group=DRAFTS, flag="speculative-tree-node-budget", least=1)

    def __post_init__(self) -> None:
        check_bounds(self)


def _require_progressive(value: object) -> None:
    known = value is None or isinstance(value, bool) or value == "ride"
    if not known and not (type(value) is int and value > 0):
        raise ValueError(
            f"`progressive` must be True, False, None, 'ride' or a positive number of tokens, got {value!r}."
        )


def _require_layers(layers: object) -> None:
    numbers = layers if isinstance(layers, tuple) else () if layers is None else (layers,)
    if (
        layers == ()
        or not all(isinstance(number, int) for number in numbers)
        or (isinstance(layers, tuple) and any(isinstance(number, bool) for number in layers))
    ):
        raise ValueError(
            f"`keep_hidden_states` must be None, True, False, the number of a layer, or a tuple of numbers, got "
            f"{layers!r}. Pass -1 for the last hidden states."
        )


def require_size(name: str, value: object, *, least: int) -> int:
    """The bytes of a setting that is a number or text.

    Raises:
        ValueError: for anything else, or less than `least`.
    """
    nbytes = parse_size(value) if isinstance(value, str) else value
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < least:
        raise ValueError(
            f"`{name}` must be {least} or more bytes, or text with a unit such as '8GB' or '7.5GiB', got {value!r}."
        )
    return nbytes


def require_streaming(config: object) -> None:
    """Raise ValueError for what is no `StreamingConfig`, such as a dict with its fields."""
    if not isinstance(config, StreamingConfig):
        given = config.items() if isinstance(config, dict) else ()
        fields = ", ".join(f"{name}={value!r}" for name, value in given) or "..."
        raise ValueError(f"A StreamingConfig is needed, got {config!r}. Pass StreamingConfig({fields}).")
