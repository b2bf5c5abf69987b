"""`EagleHeads`: the decoder layer of EAGLE-3 (Li et al., https://arxiv.org/abs/2503.01840), as its files have it.

For the token behind position t it reads hidden states of the target at t, from several of its layers, and the token at
t + 1. Behind that, where the target has not been yet, it reads what it has computed itself:

    fc(low, middle, high) or its own last state ─┐
    embedding of the next token ─────────────────┴▶ attention, MLP ─▶ norm ─▶ logits over the draft's vocabulary
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kvboost_hf.compat import HiddenForm

_LAYERS = "eagle_aux_hidden_state_layer_ids"


class KeysValues(NamedTuple):
    """Keys and values [1, num_kv_heads, tokens, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def behind(self, other: "KeysValues | None") -> "KeysValues":
        """These behind those of earlier tokens."""
        if other is None:
            return self
        return KeysValues(torch.cat([other.keys, self.keys], 2), torch.cat([other.values, self.values], 2))


class _Attention(nn.Module):
    """Attention whose queries, keys and values are made of an embedding and a hidden state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        heads: int = config.num_attention_heads
        kv_heads: int = config.num_key_value_heads or heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(
        self, states: torch.Tensor, rotary: Any, past: KeysValues | None, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, KeysValues]:
        rows, tokens, _ = states.shape

        def by_head(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, tokens, -1, self.head_dim).transpose(1, 2)

        queries, keys = apply_rotary_pos_emb(by_head(self.q_proj(states)), by_head(self.k_proj(states)), *rotary)
        new = KeysValues(keys, by_head(self.v_proj(states)))
        held = new.behind(past)
        found = F.scaled_dot_product_attention(
            queries,
            held.keys,
            held.values,
            attn_mask=seen,
            is_causal=seen is None and tokens > 1,
            enable_gqa=held.keys.shape[1] != queries.shape[1],
        )
        projected: torch.Tensor = self.o_proj(found.transpose(1, 2).reshape(rows, tokens, -1))
        return projected, new


class _MidLayer(nn.Module):
    """The decoder layer.

    Args:
        config: With `norm_before_residual`, the norm of the hidden states comes before the residual branches off.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(width, eps=eps), LlamaRMSNorm(width, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)
        self._norm_first = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rotary: Any,
        past: KeysValues | None,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, KeysValues]:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_first else hidden
        found, new = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], dim=-1), rotary, past, seen)
        hidden = residual + found
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), new


class EagleHeads(PreTrainedModel):
    """An EAGLE-3 draft, as `load_assistant` loads it.

    Args:
        config: The configuration of Llama in the folder, with `draft_vocab_size`, and `target_hidden_size` where the
            target has another width.
    """

    config_class = LlamaConfig
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        made: Any = config
        width = getattr(made, "target_hidden_size", None) or made.hidden_size
        self.read_layers = len(layer_numbers(made, None))
        draft_vocab = getattr(made, "draft_vocab_size", None) or made.vocab_size
        self.embed_tokens: Any = nn.Embedding(made.vocab_size, made.hidden_size)
        self.fc = nn.Linear(self.read_layers * width, made.hidden_size, bias=bool(getattr(made, "bias", False)))
        self.midlayer = _MidLayer(config)
        self.norm = LlamaRMSNorm(made.hidden_size, eps=made.rms_norm_eps)
        self.lm_head: Any = nn.Linear(made.hidden_size, draft_vocab, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        # What to add to a token of the draft's vocabulary, and which tokens of the target it has.
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(made.vocab_size, dtype=torch.bool))
        self.post_init()  # type: ignore[no-untyped-call]

    d2t: torch.Tensor
    t2d: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        """For each token of the draft's vocabulary, [draft_vocab_size], that of the target."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fused(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states [1, tokens, hidden_size] made of those of the target's layers, in their order."""
        found: torch.Tensor = self.fc(torch.cat([each.to(self.fc.weight) for each in states], dim=-1))
        return found

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        past: KeysValues | None = None,
        seen: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KeysValues]:
        """Compute states behind tokens.

        Args:
            input_ids: [1, tokens]: the token behind each position.
            hidden: [1, tokens, hidden_size]: `fused` ones of the position, or what this has returned for it.
            position_ids: [1, tokens].
            past: Keys and values of earlier positions; None for none.
            seen: [tokens, columns], bool: what each token sees of `past` and of these tokens; None for all before it,
                which needs an empty `past` or a single token.

        Returns:
            States [1, tokens, hidden_size], which `logits` takes, and the keys and values of these tokens.
        """
        embeds = self.embed_tokens(input_ids.to(self.embed_tokens.weight.device)).to(hidden)
        rotary = self.rotary_emb(hidden, position_ids.to(hidden.device))
        found: tuple[torch.Tensor, KeysValues] = self.midlayer(embeds, hidden, rotary, past, seen)
        return found

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft_vocab_size] of states [..., hidden_size]."""
        found: torch.Tensor = self.lm_head(self.norm(states))
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab_size] of states [..., hidden_size] over the target's tokens; others have -inf."""
        found = self.draft_logits(states).float()
        every = found.new_full((*found.shape[:-1], len(self.t2d)), -torch.inf)
        return every.index_copy_(-1, self.targets, found)


def layer_numbers(config: Any, form: HiddenForm | None) -> tuple[int, ...]:
    """The target's layers that an EAGLE-3 draft reads, by their numbers in what transformers returns.

    `eagle_aux_hidden_state_layer_ids` of the configuration has these numbers, as vLLM reads it; within `eagle_config`,
    those of layers whose output is read, as SGLang does. Without them, the second, the middle and the last but two.

    Args:
        config: The configuration of the draft.
        form: The hidden states of the target; None counts them only.
    """
    if named := getattr(config, _LAYERS, None):
        return tuple(named)
    nested = getattr(config, "eagle_config", None) or {}
    if named := nested.get(_LAYERS):
        return tuple(layer + 1 for layer in named)
    layers = form.count - 1 if form is not None else 0
    return 2, layers // 2, layers - 3


def is_eagle(config: Any) -> bool:
    """Whether a configuration is that of an EAGLE-3 draft."""
    named = any("eagle3" in name.lower() for name in getattr(config, "architectures", None) or ())
    return named or getattr(config, "draft_vocab_size", None) is not None
