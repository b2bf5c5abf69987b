"""What the package takes from the inside of other libraries: private names, local variables and cache layers.

None of it is promised to anybody, so that a release may change it. `tests/unit/test_upstream.py` compares these lists
with what is installed, and with what the package uses: a name that is used and not listed here fails, too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Private names that somebody else owns.

    Args:
        owner: The dotted path of a module, a class or a function; with `()`, of an object made by a call.
        names: The names.
        means: What the package takes them for.
        in_source: They are looked for in the text of the module `owner`, because only a run would set them.
        since: The first release of transformers that is known to have them.
    """

    owner: str
    names: frozenset[str]
    means: str
    in_source: bool = False
    since: str = "5.17"


def _names(owner: str, names: str, means: str, *, in_source: bool = False, since: str = "5.17") -> Names:
    return Names(owner, frozenset(names.split()), means, in_source, since)


PRIVATE = (
    _names(
        "transformers.generation.utils",
        "_is_user_defined",
        "generate() sets it on the cache that it was given, before it asks for the length",
        in_source=True,
    ),
    _names(
        "transformers.GenerationMixin",
        "_sample _beam_search _assisted_decoding _prefill _extract_generation_mode_kwargs",
        "the functions that run forwards for generate(), and the one that sorts their arguments",
    ),
    _names(
        "transformers.GenerationMixin",
        "_update_model_kwargs_for_generation _prepare_position_ids_for_generation _prepare_cache_for_generation",
        "the methods by which generate() makes the arguments of forwards",
    ),
    _names(
        "transformers.GenerationMixin",
        "_get_candidate_generator",
        "the method by which generate() makes the drafts of a call, by its arguments `assistant_model` and others",
    ),
    _names(
        "transformers.PreTrainedModel", "_is_stateful", "whether generate() refuses drafts for a model with states"
    ),
    _names(
        "transformers.GenerationMixin",
        "_expand_multimodal_outputs",
        "repeats encoded images for beams",
        since="5.23",
    ),
    _names(
        "transformers.generation.utils",
        "_slice_mm_encoder_output",
        "leaves out images that are not needed",
        since="5.23",
    ),
    _names(
        "transformers.generation.utils",
        "_mask_length",
        "the length of a mask of ones that generate() drops",
        in_source=True,
        since="5.23",
    ),
    _names("transformers.PreTrainedConfig", "_attn_implementation", "the name of the attention in use"),
    _names("transformers.configuration_utils", "_is_quantized", "a flag that loading sets", in_source=True),
    _names(
        "transformers.initialization", "_is_hf_initialized", "exempts a module from initialization", in_source=True
    ),
    _names(
        "transformers.PreTrainedModel",
        "_can_compile_fullgraph _supports_attention_backend _supports_flash_attn _supports_sdpa",
        "what a class of models says that it can do",
    ),
    _names(
        "transformers.GenerationMixin",
        "_supports_default_dynamic_cache",
        "whether a model takes a DynamicCache",
    ),
    _names(
        "transformers.PreTrainedModel",
        "_ep_plan _fsdp_plan _keep_in_fp32_modules _keep_in_fp32_modules_strict _keys_to_ignore_on_load_missing "
        "_keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save _no_split_modules _pp_plan "
        "_skip_keys_device_placement _tied_weights_keys _tp_plan",
        "what a class says of itself that K/V does not depend on",
    ),
    _names("transformers.PreTrainedModel", "_get_dtype_plan", "the dtypes that tensors are loaded in"),
    _names("transformers.distributed.mixin", "_tp_size", "what K/V does not depend on", in_source=True),
    _names("transformers.core_model_loading", "_weight_conversions", "what K/V does not depend on", in_source=True),
    _names(
        "transformers.utils.output_capturing",
        "_output_capturing_hooks_installed",
        "a note that K/V does not depend on",
        in_source=True,
    ),
    _names(
        "transformers.generation.utils",
        "_previous_max_cache_length",
        "a note that K/V does not depend on",
        in_source=True,
    ),
    _names(
        "transformers.modeling_utils",
        "_compiled_call _last_compile_config _use_kernels",
        "notes that K/V does not depend on",
        in_source=True,
    ),
    _names(
        "transformers.configuration_utils",
        "_commit_hash _name_or_path",
        "where a model comes from, which its K/V does not depend on",
        in_source=True,
    ),
    _names("transformers.CompileConfig", "_compile_all_devices", "whether a call is compiled on CPUs, too"),
    _names("transformers.integrations.moe", "_apply_gate", "the activation of stacked experts", in_source=True),
    _names(
        "transformers.models.t5gemma.modeling_t5gemma", "_cache", "a note that K/V does not depend on", in_source=True
    ),
    _names(
        "transformers.models.qwen2_audio.modeling_qwen2_audio",
        "_merge_input_ids_with_audio_features",
        "puts sound among the embeddings of a prompt",
        in_source=True,
    ),
    _names("accelerate.hooks", "_hf_hook _old_forward", "the hook that moves a module's weights", in_source=True),
    _names("peft.tuners.tuners_utils", "_active_adapter _disable_adapters", "which adapters are on", in_source=True),
    _names("transformers.integrations.peft", "_hf_peft_config_loaded", "whether adapters were added", in_source=True),
    _names("tokenizers.models.BPE", "_clear_cache", "empties the cache of words"),
    _names(
        "torch.nn.Module()",
        "_buffers _forward_hooks _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs "
        "_modules _non_persistent_buffers_set _parameters",
        "what a module holds",
    ),
    _names(
        "torch.nn.Module",
        "_apply _compiled_call_impl _call_impl",
        "to() and its kin; what `module.compile()` sets; the function that calls hooks and the forward",
    ),
    _names("torch.nn.modules.module", "_global_forward_hooks _global_forward_pre_hooks", "hooks of all modules"),
    _names("torch.nn.modules.dropout", "_DropoutNd", "the class of all dropout"),
    _names("torch.Tensor", "_make_wrapper_subclass _version", "a tensor without memory; how often one was changed"),
    _names("torch.UntypedStorage", "_cdata", "the address of the memory behind tensors"),
    _names(
        "torch._C",
        "_disabled_torch_function_impl _len_torch_function_stack _storage_Use_Count",
        "whether something watches operations; how many tensors use memory",
    ),
    _names("torch", "_C _dynamo", "modules of torch"),
    _names("torch.compiler", "_is_exporting_flag", "whether torch.export records"),
    _names("torch.utils", "_python_dispatch _pytree _triton", "modules of torch"),
    _names("torch.utils._python_dispatch", "_disable_current_modes", "hides modes that watch operations"),
    _names("torch", "_scaled_dot_product_flash_attention_for_cpu", "attention with its log-sum-exp"),
    _names("torch", "_weight_int4pack_mm_for_cpu", "the product of 4-bit weights on CPUs"),
    _names(
        "torch.ops:aten",
        "_convert_weight_to_int4pack_for_cpu _weight_int4pack_mm_for_cpu",
        "the product with 4-bit weights on a CPU",
    ),
    _names(
        "torch.cpu",
        "_is_amx_tile_supported _is_avx512_bf16_supported",
        "whether the processor multiplies bfloat16",
    ),
    _names("torch.cpu", "_is_avx2_supported _is_vnni_supported", "the instructions of 4-bit products"),
    _names("torch.ops:mkldnn", "_is_mkldnn_bf16_supported", "whether oneDNN multiplies bfloat16"),
    _names(
        "torch._C",
        "_get_fp32_precision_getter _get_cublas_allow_fp16_accumulation "
        "_get_cublas_allow_fp16_reduced_precision_reduction _get_cublas_allow_bf16_reduced_precision_reduction "
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "the precision of float32 numbers, and how sums are rounded, read in C",
    ),
    _names(
        "torch._C",
        "_get_tracing_state _are_functorch_transforms_active _get_dispatch_mode _TorchDispatchModeKey",
        "whether PyTorch records or transforms a forward",
    ),
    _names("torch.amp.autocast_mode", "_enabled", "whether autocast is on", in_source=True),
    _names("torch._dynamo.eval_frame", "_orig_mod _torchdynamo_orig_callable", "what was compiled", in_source=True),
    _names(
        "argparse",
        "_ActionsContainer _AppendAction _StoreTrueAction _SubParsersAction",
        "classes of flags of a command",
    ),
    _names(
        "argparse.ArgumentParser()",
        "_actions _check_value _get_value _option_string_actions",
        "the flags of a command, and the conversion of their values",
    ),
    _names("sys", "_getframe _current_frames", "the frame of a caller; those that threads run"),
    _names("threading.RLock()", "_at_fork_reinit _is_owned", "frees a lock in a forked child; who has it"),
    _names("collections", "_asdict _replace", "methods of named tuples", in_source=True),
)

# Strings that look like names, and are none: ends of names, and a word in a message.
NO_NAMES = {"_orig", "_v", "_start_serving"}

# By function of `GenerationMixin`, the local variables that are read, and what each must be.
LOCALS = {
    "generate": {
        "self": "the model",
        "generation_config": "a configuration of this call's own",
        "input_ids_length": "the number of ids that this call was given",
        "input_ids": "the ids, repeated for beams",
        "model_kwargs": "the arguments for the first forward",
        "kwargs": "the arguments that the caller gave by name",
        "inputs": "the ids that the caller gave",
        "decoding_method": "the function that decodes",
        "generation_mode_kwargs": "whether GPUs decode in step",
        "streamer": "what the caller wants tokens to be sent to",
        "custom_generate": "the loop of somebody else that decodes",
        "synced_gpus": "whether GPUs wait for each other",
    },
    "_prefill": {
        "self": "the model",
        "generation_config": "that of generate()",
        "model_inputs": "the arguments of the forward",
        "input_chunks": "the pieces of the prompt",
        "input_chunk": "the piece that is computed",
    },
    "_sample": {"self": "the model", "generation_config": "that of generate()", "model_inputs": "the arguments"},
    "_beam_search": {"self": "the model", "generation_config": "that of generate()", "model_inputs": "the arguments"},
    "_assisted_decoding": {
        "self": "the model",
        "generation_config": "that of generate()",
        "model_inputs": "the arguments of the forward",
        "candidate_generator": "what drafts",
        "input_ids": "the text so far",
        "logits_processor": "what changes scores of drafted tokens, too",
        "stopping_criteria": "what is asked once a round whether the text ends",
    },
    "_extract_generation_mode_kwargs": {
        "kwargs": "the arguments that the caller gave by name",
        "generation_mode_kwargs": "those that were taken out of them",
    },
}

_FIXED = "of a fixed size: serves calls without reuse of its own"
_QUANTIZED = "of transformers' own quantized cache"
_STATE = "in part of a fixed size"
# Cache layers of transformers that `cache/kv/model_form.py` leaves out, and what they are.
NOT_SERVED = {
    "StaticLayer": _FIXED,
    "StaticSlidingWindowLayer": _FIXED,
    "StaticIndexedLayer": _FIXED,
    "MiniMaxM3VLSparseStaticCacheLayer": _FIXED,
    "LinearAttentionAndStaticFullAttentionLayer": _STATE,
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": _STATE,
    "BaseQuantizedLayer": _QUANTIZED,
    "QuantizedLayer": _QUANTIZED,
    "QuantoQuantizedLayer": _QUANTIZED,
    "HQQQuantizedLayer": _QUANTIZED,
    "Fp8QuantizedLayer": _QUANTIZED,
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": "a window that keeps images; its model runs without reuse",
    "UnlimitedOcrStaticReferenceSlidingWindowLayer": _FIXED,
}
# Those that transformers 5.17 does not have yet.
LATER = {
    "DummyLayer",
    "BaseQuantizedLayer",
    "Fp8QuantizedLayer",
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer",
    "UnlimitedOcrStaticReferenceSlidingWindowLayer",
}
