"""The formats of checkpoints with 4-bit weights, read from the `quantization_config` in config.json.

config.json says what the tensors mean; which weights are packed, and in groups of how many rows, the tensors say.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvboost_hf.offload.awq.layout import AWQ, StoredWeight

_ELSE = "Load it with from_pretrained() as it is, without streaming."

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors of a weight, by their last names


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """The format of the 4-bit weights of a checkpoint.

    Args:
        version: Layout of the tensors, as `layout_of` has it.
        group_sizes: Rows that share a scale and a zero point, of each kind of weight; none for all rows of a weight.
        config: The quantization config of the checkpoint.
        ordered: Whether weights have an index of groups that may be in any order.
        left_out: A pattern that the names of modules begin with whose weights are not packed.
        taken: A pattern that the names of all others begin with.
    """

    version: str
    group_sizes: tuple[int, ...]
    config: dict[str, Any]
    ordered: bool = False
    left_out: str = "(?!)"
    taken: str = ""

    @classmethod
    def of(cls, config: dict[str, Any]) -> "PackedFormat":
        """Read `quantization_config` of a checkpoint.

        Raises:
            ValueError: The weights cannot be streamed.
        """
        method = str(config.get("quant_method"))
        read = _READERS.get(method)
        if read is None:
            raise ValueError(
                f"The checkpoint is quantized with {method!r}; layers are streamed from checkpoints of "
                f"{', '.join(_READERS)}, and from those that are not quantized. {_ELSE}"
            )
        return read(config)

    @classmethod
    def awq(cls, group_size: int) -> "PackedFormat":
        """AWQ's `gemm`, of a model that is yet to be quantized."""
        return cls(version="gemm", group_sizes=(group_size,), config={"quant_method": "awq"})

    @property
    def method(self) -> str:
        """The name of the format in config.json."""
        return str(self.config["quant_method"])

    @property
    def is_awq(self) -> bool:
        """Whether it is one of AWQ's."""
        return self.version in AWQ

    @property
    def words(self) -> str:
        """Last name of the tensor that packs a weight."""
        return "weight_packed" if self.version == "pack-quantized" else "qweight"

    def packs(self, name: str) -> bool:
        """Whether config.json says that the weight of a module is packed; where there are tensors, they decide."""
        return re.match(self.taken, name) is not None and re.match(self.left_out, name) is None

    def stored(self, in_features: int, shapes: Shapes) -> StoredWeight:
        """How a weight is stored.

        Args:
            in_features: Rows of the weight.
            shapes: The shapes of the tensors of each weight; empty where only the configuration is known.
        """
        if self.is_awq:
            return StoredWeight(self.version, self.group_sizes[0])
        if not shapes:
            sizes = self.group_sizes or (in_features,)
            size = next((size for size in sizes if in_features % size == 0), sizes[0])
            return StoredWeight(self.version, size, index=self.ordered, ordered=self.ordered)
        gptq = self.version != "pack-quantized"
        groups = shapes.get("scales", (1, 1))[0] if gptq else shapes.get("weight_scale", (1, 1))[-1]
        size = next((size for size in self.group_sizes if -(-in_features // size) == groups), in_features // groups)
        index = ("g_idx" if gptq else "weight_g_idx") in shapes
        zeros = gptq or "weight_zero_point" in shapes
        return StoredWeight(self.version, size, zeros=zeros, index=index, ordered=index and (self.ordered or not gptq))


def _awq(config: dict[str, Any]) -> PackedFormat:
    bits = config.get("bits", config.get("w_bit", 4))
    group_size = config.get("group_size", config.get("q_group_size", 128))
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if config.get("backend") == "llm-awq":
        version = "llm-awq"
    if bits != 4 or group_size not in (32, 64, 128) or not config.get("zero_point", True):
        raise ValueError(
            f"AWQ weights must have 4 bits, groups of 32, 64 or 128 and zero points, got {bits} bits, groups of "
            f"{group_size} and zero_point={config.get('zero_point', True)}."
        )
    if version not in AWQ:
        raise ValueError(f"The layout of AWQ weights must be one of {AWQ}, got {version!r}.")
    names = config.get("modules_to_not_convert") or ()
    left_out = _any_of(pattern for name in names for pattern in (name, f".*{re.escape(name)}$"))
    return PackedFormat(version=version, group_sizes=(group_size,), config=config, left_out=left_out)


def _compressed_tensors(config: dict[str, Any]) -> PackedFormat:
    for setting in ("kv_cache_scheme", "transform_config"):
        if config.get(setting):
            raise ValueError(
                f"`{setting}` of a compressed-tensors checkpoint must be empty to stream it, got {config[setting]}: "
                f"only weights may be quantized or transformed. {_ELSE}"
            )
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"Weights of a compressed-tensors checkpoint must be dense, got {sparsity!r}. {_ELSE}")
    groups: dict[str, dict[str, Any]] = config.get("config_groups") or {}
    for name, group in groups.items():
        _require_int4(name, group, config.get("format"))
    targets = [target for group in groups.values() for target in group.get("targets") or ()]
    sizes = {group["weights"].get("group_size") or 0 for group in groups.values()}
    return PackedFormat(
        version="pack-quantized",
        group_sizes=tuple(sorted((size for size in sizes if size > 0), reverse=True)),
        config=config,
        ordered=any(group["weights"].get("actorder") in (True, "group", "dynamic") for group in groups.values()),
        left_out=_any_of(map(_pattern, config.get("ignore") or ())),
        taken=_any_of(".*" if each == "Linear" else _pattern(each) for each in targets) if targets else "",
    )


def _require_int4(name: str, group: dict[str, Any], format_of_all: str | None) -> None:
    weights = group.get("weights") or {}
    allowed = {
        "format": ("pack-quantized",),
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group", "channel"),
        "dynamic": (False,),
        "input_activations": (None,),
        "output_activations": (None,),
    }
    found = {
        "format": group.get("format") or format_of_all,
        "num_bits": weights.get("num_bits"),
        "type": weights.get("type", "int"),
        "strategy": weights.get("strategy"),
        "dynamic": weights.get("dynamic", False),
        "input_activations": group.get("input_activations"),
        "output_activations": group.get("output_activations"),
    }
    for setting, values in allowed.items():
        if found[setting] not in values:
            raise ValueError(
                f"`{setting}` of {name!r} in the config_groups of a compressed-tensors checkpoint must be "
                f"{' or '.join(map(repr, values))} to stream it, got {found[setting]!r}: weights are integers of 4 "
                f"bits, and nothing else is quantized. Take one of scheme W4A16. {_ELSE}"
            )


def _gptq(config: dict[str, Any]) -> PackedFormat:
    rules: dict[str, Any] = config.get("dynamic") or {}  # by patterns of names; the first that fits applies
    kept = [rule for rule, changes in rules.items() if rule.startswith("-:") or not changes]
    kinds = [config, *(changes for rule, changes in rules.items() if rule not in kept)]
    version = "marlin" if config.get("is_marlin_format") else config.get("checkpoint_format", config.get("format"))
    found = {
        "bits": {kind["bits"] for kind in kinds if "bits" in kind},
        "checkpoint_format": {str(version or "gptq").lower()},
        "pack_dtype": {str(config.get("pack_dtype", "int32"))},
        **{setting: {config.get(setting) or None} for setting in ("activation", "rotation")},
    }
    allowed = {
        "bits": (4,),
        "checkpoint_format": ("gptq", "gptq_v2", "gptq_p"),  # the last is the second, at 4 bits
        "pack_dtype": ("int32",),
        "activation": (None,),
        "rotation": (None,),
    }
    for setting, values in allowed.items():
        if wrong := found[setting] - {*values}:
            raise ValueError(
                f"`{setting}` of a GPTQ checkpoint must be {' or '.join(map(repr, values))} for all of its weights to "
                f"stream it, got {wrong.pop()!r}. {_ELSE}"
            )
    sizes = {kind["group_size"] for kind in kinds if "group_size" in kind}
    parts = config.get("modules_in_block_to_quantize") or ()
    inside = [name for part in parts for name in ((part,) if isinstance(part, str) else part)]
    return PackedFormat(
        version="gptq" if found["checkpoint_format"] == {"gptq"} else "gptq_v2",
        group_sizes=tuple(sorted((size for size in sizes if size > 0), reverse=True)),
        config=config,
        ordered=any(kind.get("desc_act", kind is config) for kind in kinds),
        left_out=_any_of(rule.removeprefix("-:") for rule in kept),
        taken=_any_of(f".*{re.escape(name)}$" for name in inside) if inside else "",
    )


def _any_of(patterns: Iterable[str]) -> str:
    return "|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)"


def _pattern(entry: str) -> str:
    """The pattern of a target of compressed-tensors: a name, or a pattern after `re:`."""
    return entry.removeprefix("re:") if entry.startswith("re:") else f"{re.escape(entry)}$"


_READERS: dict[str, Callable[[dict[str, Any]], PackedFormat]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
}
