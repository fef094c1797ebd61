"""Multi-head latent attention over a paged cache of latents (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are linear in one latent a token, so only that is cached, with one rotated key
part that heads share. Attention is computed in one of two forms, equal but for rounding:

- naive: the context's latents are expanded to keys and values of every head, then attended to as usual;
- absorbed: the expansion is applied to the query and to the result instead, and all heads attend to the
  cached latents themselves.

Per head and position of the context, expanding costs kv_lora_rank * (qk_nope_head_dim + v_head_dim) products
once, and each query then saves the difference between attending to a latent and to a key and value. So a
sequence whose rows in a step are `naive_rows` or more is computed naively - long chunks of a prompt - and
every other - decodes, verifications, short chunks - absorbed. The form hangs on a sequence's own rows in the
step, never on its batch mates; where it changes, results change by rounding, as with any other split of a sum.

The compiled CPU kernels promise that a row's bits hang on nothing but its own past, however a prompt is cut,
resumed or found in the cache. There the absorbed form computes all rows, and long prompts pay for the promise.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels import ops
from kernels.metadata import AttentionMetadata
from kernels.packed_weight import Weight
from models import parallel
from models.kv_spec import LayerKVSpec
from models.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.parameter import Shard, UnloadedParameter
from models.layers.rotary import RotaryEmbedding
from models.model_config import LatentAttentionConfig, ModelConfig

LATENT_NORM_EPS = 1e-6  # of the reference code, which does not read rms_norm_eps for these two norms
# Entries of expanded keys and values held at once; a longer context is attended to in the absorbed form.
MAX_EXPANDED_ENTRIES = 1 << 27


def naive_rows(config: LatentAttentionConfig) -> int | None:
    """Rows of a sequence from which on the naive form is the cheaper one; None: from no number on.

    171 for DeepSeek-V3: 512 * 256 products to expand, (2 * 512 + 64) - (192 + 128) saved a query.
    """
    expansion = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    saved = config.cached_dim + config.kv_lora_rank - config.qk_head_dim - config.v_head_dim
    return -(-expansion // saved) if saved > 0 else None


class LatentExpansion(nn.Module):
    """kv_b_proj: from a latent to the keys' part without position and to the values, of this rank's heads.

    Once loaded it is kept in two halves, laid out as the absorbed form reads them.
    """

    key_weight: Weight  # [num_heads, kv_lora_rank, qk_nope_head_dim]: a query's part to what latents are scored with
    value_weight: Weight  # [num_heads, v_head_dim, kv_lora_rank]

    def __init__(self, config: LatentAttentionConfig, num_attention_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = parallel.share(num_attention_heads, "num_attention_heads")
        self.key_dim = config.qk_nope_head_dim
        head_rows, rank = config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        num_rows = self.num_heads * head_rows
        shard = Shard.of_rows((num_attention_heads * head_rows, rank), parallel.tp_rank() * num_rows, num_rows)
        self.weight = UnloadedParameter((num_rows, rank), dtype, (shard,), packed=False)

    def split(self) -> None:
        """Puts the halves in the place of the loaded weight: views of it where kernels read plain tensors."""
        heads = self.weight.detach().unflatten(0, (self.num_heads, -1))
        del self.weight
        halves = {"key_weight": heads[:, : self.key_dim].transpose(1, 2), "value_weight": heads[:, self.key_dim :]}
        for name, half in halves.items():
            weight = ops.pack_weight(half)
            setattr(self, name, nn.Parameter(weight, requires_grad=False) if weight is half else weight)

    def forward(
        self,
        latents: torch.Tensor,  # [..., kv_lora_rank]
    ) -> torch.Tensor:  # [..., num_heads, qk_nope_head_dim + v_head_dim]
        """The expansion itself. Its matrix is put together for the call: it is worth it for long chunks only."""
        halves = ops.unpack_weight(self.key_weight).transpose(1, 2), ops.unpack_weight(self.value_weight)
        matrix = torch.cat(halves, dim=1).flatten(0, 1)
        return ops.linear(latents, ops.pack_weight(matrix)).unflatten(-1, (self.num_heads, -1))


class LatentAttention(nn.Module):
    """Causal self-attention of one layer."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        mla = config.latent_attention
        assert mla is not None
        self.config, self.rotary = mla, rotary
        self.num_heads = parallel.share(config.num_attention_heads, "num_attention_heads")
        self.naive_rows = naive_rows(mla)
        hidden_size, dtype = config.hidden_size, config.dtype
        query_features = config.num_attention_heads * mla.qk_head_dim
        name = "num_attention_heads"
        if mla.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, query_features, bias=False, dtype=dtype, name=name)
            self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, [mla.cached_dim], mla.bias, dtype)
        else:
            sizes = [mla.q_lora_rank, mla.cached_dim]
            self.q_kv_a_proj = ReplicatedLinear(hidden_size, sizes, mla.bias, dtype)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS, dtype)
            self.q_b_proj = ColumnParallelLinear(mla.q_lora_rank, query_features, bias=False, dtype=dtype, name=name)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS, dtype)
        self.kv_b_proj = LatentExpansion(mla, config.num_attention_heads, dtype)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * mla.v_head_dim, hidden_size, bias=mla.bias, dtype=dtype, name=name
        )
        self.kv_spec = LayerKVSpec(((mla.cached_dim,),), dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        positions: torch.Tensor,  # [num_tokens]
        kv_layer: tuple[torch.Tensor, ...],  # latents [num_blocks, block_size, cached_dim]
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        mla = self.config
        query, latent = self._project(hidden_states)
        latent, key_rope = latent.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        query_nope, query_rope = query.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        query_rope, key_rope = self.rotary(positions, query_rope, key_rope.unsqueeze(1))
        (latent_cache,) = kv_layer
        cached = torch.cat((self.kv_a_layernorm(latent), key_rope.squeeze(1)), dim=-1)
        ops.store_latent(cached, latent_cache, attention.slot_mapping)
        return self.o_proj(self._attend(query_nope, query_rope, latent_cache, attention).flatten(1))

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [num_tokens, num_heads, qk_head_dim] and what is cached, not yet normed and rotated."""
        if self.config.q_lora_rank is None:
            query, latent = self.q_proj(hidden_states), self.kv_a_proj_with_mqa(hidden_states)
        else:
            sizes = (self.config.q_lora_rank, self.config.cached_dim)
            query_latent, latent = self.q_kv_a_proj(hidden_states).split(sizes, dim=-1)
            query = self.q_b_proj(self.q_a_layernorm(query_latent))
        return query.unflatten(-1, (self.num_heads, -1)), latent

    def _attend(
        self,
        query_nope: torch.Tensor,  # [num_tokens, num_heads, qk_nope_head_dim]
        query_rope: torch.Tensor,  # [num_tokens, num_heads, qk_rope_head_dim]
        latent_cache: torch.Tensor,
        attention: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_heads, v_head_dim]
        naive = self._naive_sequences(latent_cache, attention)
        if not naive:
            return self.attend_absorbed(query_nope, query_rope, latent_cache, attention)
        attended = query_nope.new_zeros((*query_nope.shape[:2], self.config.v_head_dim))
        for seq in naive:
            rows, metadata = attention.select([seq])
            attended[rows] = self.attend_naive(query_nope[rows], query_rope[rows], latent_cache, metadata)
        others = [seq for seq in range(len(attention.context_lens)) if seq not in naive]
        if others:
            rows, metadata = attention.select(others)
            attended[rows] = self.attend_absorbed(query_nope[rows], query_rope[rows], latent_cache, metadata)
        return attended

    def _naive_sequences(self, latent_cache: torch.Tensor, attention: AttentionMetadata) -> list[int]:
        """Those whose rows are worth an expansion that fits. Only a step with a long chunk waits for the device."""
        if self.naive_rows is None or attention.max_seqlen_q < self.naive_rows or ops.is_row_invariant(latent_cache):
            return []
        head_dim = max(self.config.qk_head_dim, self.config.v_head_dim)
        max_context = MAX_EXPANDED_ENTRIES // (2 * head_dim * self.num_heads)
        num_rows, context_lens = attention.host_lens
        return [
            seq
            for seq, (rows, context_len) in enumerate(zip(num_rows, context_lens, strict=True))
            if rows >= self.naive_rows and context_len <= max_context
        ]

    def attend_absorbed(
        self,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent_cache: torch.Tensor,
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        """Scores are (query_nope W_key) . latent + query_rope . key_rope; summed latents become values at last."""
        query = torch.cat((ops.batched_linear(query_nope, self.kv_b_proj.key_weight), query_rope), dim=-1)
        latents = ops.latent_attention(
            query, latent_cache, attention, self.config.softmax_scale, self.config.kv_lora_rank
        )
        return ops.batched_linear(latents, self.kv_b_proj.value_weight)

    def attend_naive(
        self,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent_cache: torch.Tensor,
        attention: AttentionMetadata,  # of one sequence
    ) -> torch.Tensor:
        """The sequence's blocks, expanded, are a paged cache of their own, of which it has every block in order."""
        mla, block_size = self.config, latent_cache.shape[1]
        num_blocks = -(-attention.max_context_len // block_size)
        cached = latent_cache[attention.block_tables[0, :num_blocks].long()]
        latents, key_rope = cached.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        key_nope, value = self.kv_b_proj(latents).split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        key_rope = key_rope.unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        query, key = torch.cat((query_nope, query_rope), dim=-1), torch.cat((key_nope, key_rope), dim=-1)
        # Kernels want values as wide as keys: zeros add nothing to a score, and are cut off a value again.
        head_dim = max(mla.qk_head_dim, mla.v_head_dim)
        query, key = (F.pad(each, (0, head_dim - mla.qk_head_dim)) for each in (query, key))
        attended = ops.paged_attention(
            query,
            key,
            F.pad(value, (0, head_dim - mla.v_head_dim)),
            attention.with_own_blocks(num_blocks),
            mla.softmax_scale,
        )
        return attended[..., : mla.v_head_dim]
