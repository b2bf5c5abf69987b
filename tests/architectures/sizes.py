"""One set of small sizes for all architectures, and what single ones need besides."""

from typing import Any

VOCAB = 200
WINDOW = 24  # tokens of every sliding window and attention chunk: much fewer than the prompts have

# Configurations have many names for one thing; each is given those that it knows.
SIZES: dict[str, Any] = {
    # The width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("dim_ff", "dff", "d_inner", "n_inner", "feed_forward_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size"), 96),
    # Heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_head", "dim_head", "attention_head_size", "v_head_dim"), 16),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    # Positions
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "window_size", "local_attention"), WINDOW),
    # Experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    # Attention to tokens that an index picks
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, many tokens score exactly 0, and which of them are picked is left to chance
    "index_topk": 32,
    # Linear attention and state-space layers
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 16),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    "n_groups": 1,
    "lru_width": 64,
    # The parts of encoder-decoders, of which only the decoder is built
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    "is_encoder_decoder": False,
    "is_decoder": True,
    # Embeddings of single layers
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    # Weights ten times larger than usual: with the usual ones a tiny model says the same whatever its K/V.
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor", "embed_init_std"), 0.2),
    # Tokens
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 199,
}
# Left out where the default is None or 0: the architecture has it, but its models do not use it.
OPTIONAL = ("sliding_window", "attention_chunk_size", "n_inner", "q_lora_rank")

_LINEAR_AND_FULL = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_SLIDING_AND_FULL = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CONV_AND_FULL = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_SHARED_BLOCKS = {"num_hidden_layers": 3, "layers_block_type": ["hybrid", "linear_attention", "hybrid"]}
_INKLING = {
    "num_hidden_layers": 3,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 64,
}
_NO_ROPE_IN_FULL = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": None}

# What the sizes above get wrong, and kinds of layers that published models have and default configurations lack.
# By the model type of a configuration.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {**_SLIDING_AND_FULL, "rope_parameters": _NO_ROPE_IN_FULL},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "dory": {**_SLIDING_AND_FULL, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        **_SLIDING_AND_FULL,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_SLIDING_AND_FULL,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": {**_SLIDING_AND_FULL, "global_head_dim": 32},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _LINEAR_AND_FULL,
    "hrm_text": {"num_hidden_layers": 1},
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 2, "unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 1,
        "unpadded_vocab_size": VOCAB,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "inkling_text": {**_INKLING, "logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_AND_FULL,
    "laguna": _SLIDING_AND_FULL,
    "lfm2": _CONV_AND_FULL,
    "lfm2_moe": _CONV_AND_FULL,
    "llama4_text": {"floor_scale": 16},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mellum": _SLIDING_AND_FULL,
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 4,
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phi3": {"sliding_window": WINDOW},
    "phi4_multimodal": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "qwen4_exp_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ("local", "lsh"),
        "num_hidden_layers": 2,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 8,
        "hash_seed": 0,
    },
    "roc_bert": {"pronunciation_vocab_size": 300, "shape_vocab_size": 300},
    "starcoder2": {"sliding_window": WINDOW},
    "xlm": {"mask_token_id": 5},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED_BLOCKS,
    "zamba2": _SHARED_BLOCKS,
    "zaya": {
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": WINDOW,
        "num_experts_per_tok": 1,
    },
}
