"""DeepSeek-V3 and R1: latent attention, and experts chosen by a bias that balances their load."""

from dataclasses import replace

from models.config_fields import ConfigFields
from models.decoder_config import read_decoder_config
from models.layers.decoder_layer import DecoderLayer
from models.layers.latent_attention import LatentAttention
from models.layers.mlp import GatedMLP
from models.layers.moe import MoE
from models.layers.rotary import RotaryEmbedding
from models.layers.router import SCORING_FUNCS, TOPK_METHODS
from models.model_config import LatentAttentionConfig, ModelConfig, MoEConfig, YarnRopeScaling, yarn_mscale


def read_config(fields: ConfigFields) -> ModelConfig:
    config = read_deepseek_config(
        fields, topk_methods=("noaux_tc",), interleaved=fields.boolean("rope_interleave", default=True)
    )
    return replace(config, num_nextn_predict_layers=fields.count("num_nextn_predict_layers", default=0))


def read_deepseek_config(fields: ConfigFields, topk_methods: tuple[str, ...], interleaved: bool) -> ModelConfig:
    """What V2 and V3 have in common. The first of `topk_methods` is meant where the file names none."""
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "its entries are rotated in pairs: it must be even")
    config = read_decoder_config(fields.filled(head_dim=rope_dim))
    fields.require("tie_word_embeddings", False, default=False)
    return replace(
        config,
        head_dim=rope_dim,  # of what is rotated
        rope=replace(config.rope, interleaved=interleaved),
        latent_attention=_read_latent_attention(fields, config),
        moe=_read_moe(fields, config, topk_methods),
    )


def decoder_layer(config: ModelConfig, layer_index: int, rotary: RotaryEmbedding) -> DecoderLayer:
    """Latent attention, then a dense MLP in the first layers and experts in all others, those behind the last too."""
    assert config.moe is not None
    mlp: GatedMLP | MoE
    if layer_index < config.moe.first_k_dense_replace:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.dtype)
    else:
        mlp = MoE(config)
    return DecoderLayer(config, LatentAttention(config, rotary), mlp)


def _read_latent_attention(fields: ConfigFields, config: ModelConfig) -> LatentAttentionConfig:
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    scale = (nope_dim + rope_dim) ** -0.5
    scaling = config.rope.scaling
    if isinstance(scaling, YarnRopeScaling) and scaling.mscale_all_dim is not None:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return LatentAttentionConfig(
        q_lora_rank=fields.nullable_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        softmax_scale=scale,
        bias=fields.boolean("attention_bias", default=False),
    )


def _read_moe(fields: ConfigFields, config: ModelConfig, topk_methods: tuple[str, ...]) -> MoEConfig:
    fields.require("moe_layer_freq", 1, default=1)
    topk_method = fields.text("topk_method", default=topk_methods[0])
    if topk_method not in topk_methods:
        known = " or ".join(topk_methods)
        raise fields.error("topk_method", f"use a checkpoint with {known}: {config.architecture} has no other here")
    method = TOPK_METHODS[topk_method]
    scoring_func = fields.text("scoring_func", default=method.scoring_func)
    if scoring_func not in SCORING_FUNCS or scoring_func != method.scoring_func:
        remedy = f'use a checkpoint with "{method.scoring_func}", which topk_method "{topk_method}" goes with'
        raise fields.error("scoring_func", remedy)

    n_routed_experts, n_group = fields.integer("n_routed_experts"), fields.integer("n_group", default=1)
    topk_group = fields.integer("topk_group", default=n_group)
    if n_routed_experts % n_group:
        raise fields.error("n_group", f"it must divide n_routed_experts, {n_routed_experts}")
    if topk_group > n_group:
        raise fields.error("topk_group", f"it must be at most n_group, {n_group}")
    if method.has_bias and topk_group < n_group and n_routed_experts < 2 * n_group:
        raise fields.error("n_group", f"a group of {topk_method} needs two experts: {n_routed_experts} are too few")
    num_experts_per_tok = fields.integer("num_experts_per_tok")
    in_groups = n_routed_experts // n_group * (topk_group if method.score_groups is not None else n_group)
    if num_experts_per_tok > in_groups:
        raise fields.error("num_experts_per_tok", f"only {in_groups} experts are in a token's groups")
    return MoEConfig(
        n_routed_experts=n_routed_experts,
        num_experts_per_tok=num_experts_per_tok,
        n_shared_experts=fields.integer("n_shared_experts"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        topk_method=topk_method,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=method.has_bias),
        routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
        first_k_dense_replace=fields.count("first_k_dense_replace"),
    )
