"""Tiny random multimodal models, and prompts for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

IMAGE, VIDEO, AUDIO, START, END = 190, 191, 192, 193, 194
VOCAB, EOS = 200, 199
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "max_position_embeddings": 2048,
    **_SPECIAL,
}
_MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "initializer_range": 0.2,
    **_SPECIAL,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Family:
    """How to make a model, and what it takes to show it something."""

    make: Callable[[], PreTrainedModel]
    tokens: int  # placeholders of one item
    item: Callable[[torch.Generator], dict[str, torch.Tensor]]  # arguments of one item
    token: int = IMAGE
    types: str | None = None
    type_value: int = 1


def _pixels(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


def _patches(kind: str, dim: int, grid: tuple[int, int, int]) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}[kind]

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        patches = torch.randn(grid[0] * grid[1] * grid[2], dim, generator=generator)
        return {names[0]: patches, names[1]: torch.tensor([grid])}

    return make


def _qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    return tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_QWEN_IDS)
    )


def _qwen2_5_vl() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 48,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_QWEN_IDS)
    )


def _qwen3_vl() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 48,
        "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
    }  # fmt: skip
    text = {**_TEXT, "num_hidden_layers": 3, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    return tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS))


def _glm4v() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 48,
        "image_size": 16, "spatial_merge_size": 2,
    }  # fmt: skip
    text = {**_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}
    ids = {**_QWEN_IDS, "image_start_token_id": START, "image_end_token_id": END}
    return tf.Glm4vForConditionalGeneration(tf.Glm4vConfig(text_config=text, vision_config=vision, **ids))


def _llava() -> PreTrainedModel:
    config = tf.LlavaConfig(  # type: ignore[call-arg]
        text_config=tf.LlamaConfig(**_TEXT), vision_config=tf.CLIPVisionConfig(**_CLIP), image_token_index=IMAGE,
        vision_feature_layer=-1, initializer_range=0.2, **_SPECIAL,
    )  # fmt: skip
    return tf.LlavaForConditionalGeneration(config)


def _gemma3(sliding: bool) -> PreTrainedModel:
    text = {**_TEXT, "layer_types": ["full_attention", "sliding_attention" if sliding else "full_attention"]}
    config = tf.Gemma3Config(
        text_config={**text, "sliding_window": 24}, vision_config=_CLIP, mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END, initializer_range=0.2, **_SPECIAL,
    )  # fmt: skip
    return tf.Gemma3ForConditionalGeneration(config)


def _cohere2_vision() -> PreTrainedModel:
    layers = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    config = tf.Cohere2VisionConfig(
        text_config={"model_type": "cohere2", **_TEXT, **layers},
        vision_config={"model_type": "siglip_vision_model", **_CLIP},
        image_token_id=IMAGE, downsample_factor=2, **_SPECIAL,
    )  # fmt: skip
    return tf.Cohere2VisionForConditionalGeneration(config)


def _qwen3_5() -> PreTrainedModel:
    """Linear and full attention, with positions in three dimensions."""
    linear = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    text = {
        **_TEXT,
        **linear,
        "num_hidden_layers": 3,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
    }
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
        "intermediate_size": 48, "num_position_embeddings": 64,
    }  # fmt: skip
    return tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(text_config=text, vision_config=vision, **_QWEN_IDS))


def hunyuan_vl() -> PreTrainedModel:
    """Rotary positions in four dimensions, which it computes without embeddings."""
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "out_hidden_size": 64, "text_hidden_size": 64, "patch_size": 4, "max_image_size": 64, "min_image_size": 16,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2, 2], "rope_theta": 10000.0}
    config = tf.HunYuanVLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision)
    return tf.HunYuanVLForConditionalGeneration(config).eval()


def exaone4_5() -> PreTrainedModel:
    """The layers count columns, so that generate() leaves positions out."""
    vision = {
        "depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "num_key_value_heads": 2,
        "patch_size": 4, "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [0],
    }  # fmt: skip
    layers = {"model_type": "exaone4", "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    config = tf.Exaone4_5_Config(text_config={**_TEXT, **layers}, vision_config=vision, image_token_id=IMAGE)
    return tf.Exaone4_5_ForConditionalGeneration(config).eval()


def _lfm2_vl() -> PreTrainedModel:
    """Convolutions and full attention."""
    text = {
        "model_type": "lfm2", **_TEXT, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3, "block_ff_dim": 96,
    }  # fmt: skip
    vision = {"model_type": "siglip2_vision_model", **_CLIP, "num_patches": 16}
    del vision["image_size"]
    config = tf.Lfm2VlConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, downsample_factor=2,
        projector_hidden_size=64, **_SPECIAL,
    )  # fmt: skip
    return tf.Lfm2VlForConditionalGeneration(config)


def _with_shapes(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(1, 16, 48, generator=generator),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }


def _paligemma() -> PreTrainedModel:
    config = tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **_TEXT}, vision_config={"model_type": "siglip_vision_model", **_CLIP},
        image_token_index=IMAGE, projection_dim=64, **_SPECIAL,
    )  # fmt: skip
    return tf.PaliGemmaForConditionalGeneration(config)


def _idefics3() -> PreTrainedModel:
    config = tf.Idefics3Config(
        text_config={"model_type": "llama", **_TEXT}, vision_config=_CLIP, image_token_id=IMAGE, scale_factor=2,
        **_SPECIAL,
    )  # fmt: skip
    return tf.Idefics3ForConditionalGeneration(config)


def _smolvlm() -> PreTrainedModel:
    config = tf.SmolVLMConfig(
        text_config={"model_type": "llama", **_TEXT}, vision_config=_CLIP, image_token_id=IMAGE, scale_factor=2,
        **_SPECIAL,
    )  # fmt: skip
    return tf.SmolVLMForConditionalGeneration(config)


def _internvl() -> PreTrainedModel:
    config = tf.InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT},
        vision_config={**_CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE, downsample_ratio=0.5, vision_feature_layer=-1, **_SPECIAL,
    )  # fmt: skip
    return tf.InternVLForConditionalGeneration(config)


def _mistral3() -> PreTrainedModel:
    config = tf.Mistral3Config(
        text_config={"model_type": "mistral", "sliding_window": None, **_TEXT},
        vision_config={"model_type": "pixtral", **_CLIP, "head_dim": 16},
        image_token_index=IMAGE, spatial_merge_size=2, vision_feature_layer=-1, **_SPECIAL,
    )  # fmt: skip
    return tf.Mistral3ForConditionalGeneration(config)


def _aya_vision() -> PreTrainedModel:
    config = tf.AyaVisionConfig(
        text_config={"model_type": "cohere", **_TEXT}, vision_config={"model_type": "siglip_vision_model", **_CLIP},
        image_token_index=IMAGE, downsample_factor=2, vision_feature_layer=-1, **_SPECIAL,
    )  # fmt: skip
    return tf.AyaVisionForConditionalGeneration(config)


def _llama4() -> PreTrainedModel:
    text = {
        **_TEXT, "intermediate_size_mlp": 96, "num_local_experts": 2, "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [],
    }  # fmt: skip
    vision = {**_CLIP, "vision_output_dim": 64, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 64,
              "projector_output_dim": 64, "intermediate_size": 128}  # fmt: skip
    config = tf.Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE, **_SPECIAL)
    return tf.Llama4ForConditionalGeneration(config)


def _qwen2_audio() -> PreTrainedModel:
    audio = {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2,
             "encoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16}  # fmt: skip
    config = tf.Qwen2AudioConfig(  # type: ignore[call-arg]
        text_config={"model_type": "qwen2", **_TEXT},
        audio_config=audio,
        audio_token_index=AUDIO,
        initializer_range=0.2,
    )
    return tf.Qwen2AudioForConditionalGeneration(config)


def _qwen2_5_omni() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 48,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
             "num_mel_bins": 8, "output_dim": 64, "n_window": 4, "max_source_positions": 16}  # fmt: skip
    return tf.Qwen2_5OmniThinkerForConditionalGeneration(
        tf.Qwen2_5OmniThinkerConfig(
            text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, audio_config=audio, **_QWEN_IDS
        )
    )


def _voxtral() -> PreTrainedModel:
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
             "num_mel_bins": 8, "max_source_positions": 16}  # fmt: skip
    text = {"model_type": "llama", **_TEXT}
    config = tf.VoxtralConfig(text_config=text, audio_config=audio, audio_token_id=AUDIO, **_SPECIAL)
    return tf.VoxtralForConditionalGeneration(config)


def _mllama() -> PreTrainedModel:
    text = {**_TEXT, "cross_attention_layers": [1], "num_hidden_layers": 3}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1,
              "attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_output_dim": 64,
              "intermediate_layers_indices": [0], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
    config = tf.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return tf.MllamaForConditionalGeneration(config)


def _mel(frames: int) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"input_features": torch.randn(1, 8, frames, generator=generator)}

    return make


def _masked_mel(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_mel(32)(generator), "feature_attention_mask": torch.ones(1, 32, dtype=torch.long)}


def _nested(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 1, 3, 16, 16, generator=generator)}


def _sized(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_pixels(generator), "image_sizes": torch.tensor([[16, 16]])}


def _tiles(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16, generator=generator),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
    }


_QWEN_DIM = 3 * 2 * 4 * 4
FAMILIES: dict[str, Family] = {
    "llava": Family(_llava, 16, _pixels),
    "qwen2_vl": Family(_qwen2_vl, 16, _patches("image", _QWEN_DIM, (1, 8, 8)), types="mm_token_type_ids"),
    "qwen2_5_vl": Family(_qwen2_5_vl, 16, _patches("image", _QWEN_DIM, (1, 8, 8)), types="mm_token_type_ids"),
    "qwen2_5_omni": Family(_qwen2_5_omni, 16, _patches("image", _QWEN_DIM, (1, 8, 8))),
    "qwen3_vl": Family(_qwen3_vl, 16, _patches("image", _QWEN_DIM, (1, 8, 8)), types="mm_token_type_ids"),
    "glm4v": Family(_glm4v, 16, _patches("image", _QWEN_DIM, (1, 8, 8)), types="mm_token_type_ids"),
    "qwen2_vl_video": Family(
        _qwen2_vl, 32, _patches("video", _QWEN_DIM, (2, 8, 8)), VIDEO, types="mm_token_type_ids", type_value=2
    ),
    # The frames of a video are put in the place of ids of images.
    "glm4v_video": Family(
        _glm4v, 16, _patches("video", _QWEN_DIM, (1, 8, 8)), types="mm_token_type_ids", type_value=2
    ),
    "gemma3": Family(lambda: _gemma3(False), 4, _pixels, types="token_type_ids"),
    "gemma3_sliding": Family(lambda: _gemma3(True), 4, _pixels, types="token_type_ids"),
    "cohere2_vision": Family(_cohere2_vision, 4, _pixels),
    "qwen3_5": Family(_qwen3_5, 16, _patches("image", _QWEN_DIM, (1, 8, 8)), types="mm_token_type_ids"),
    "lfm2_vl": Family(_lfm2_vl, 4, _with_shapes),
    "paligemma": Family(_paligemma, 16, _pixels, types="token_type_ids", type_value=0),
    "idefics3": Family(_idefics3, 4, _nested),
    "smolvlm": Family(_smolvlm, 4, _nested),
    "internvl": Family(_internvl, 4, _pixels),
    "mistral3": Family(_mistral3, 4, _sized),
    "aya_vision": Family(_aya_vision, 4, _pixels),
    "llama4": Family(_llama4, 4, _pixels),
    "qwen2_audio": Family(_qwen2_audio, 8, _masked_mel, AUDIO),
    "voxtral": Family(_voxtral, 4, _mel(32), AUDIO),
    "mllama": Family(_mllama, 1, _tiles),
}


def make_model(name: str, seed: int = 0) -> Any:
    """A tiny random model in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[name].make().eval()
    with torch.no_grad():  # as much weight on what is seen as on what is read
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
    return model


def prompt(name: str, *parts: int | list[int], rows: int = 1) -> dict[str, Any]:
    """A prompt of texts, given as lists of ids, and of items, given as numbers: the same number is the same item."""
    family = FAMILIES[name]
    ids: list[int] = []
    items: list[dict[str, torch.Tensor]] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            ids += [START, *[family.token] * family.tokens, END]
            items.append(family.item(torch.Generator().manual_seed(part)))
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids] * rows)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if family.types is not None:
        inputs[family.types] = (inputs["input_ids"] == family.token).long() * family.type_value
    for key in items[0] if items else ():
        nested = items[0][key].ndim == 5
        inputs[key] = torch.cat([item[key] for item in items] * rows, dim=1 if nested else 0)
    return inputs


def text(n: int, seed: int) -> list[int]:
    """Ids of `n` random tokens, none of them special."""
    found: list[int] = torch.randint(2, 190, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found
