"""Everything the engine is told, with vLLM's names; no Ray, no HTTP."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.speculative.config import SpeculativeConfig


class EngineConfig(BaseModel):
    """Model, sizes and speculation of one engine. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="Hugging Face folder, hub id, or .gguf file.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto: the checkpoint's.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    max_model_len: int | None = Field(
        None, ge=2, description="Prompt and answer together, in tokens. Default: the checkpoint's limit, at most 8192."
    )
    max_num_seqs: int = Field(32, ge=1, description="Sequences in one step, at most.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Rows of one forward pass, at most.")
    block_size: int = Field(16, ge=1, description="Tokens in a KV block.")
    kv_cache_memory: int | Literal["auto"] = Field(
        "auto", description="Bytes of each rank's KV pool. auto: what max_num_seqs contexts need, within free memory."
    )
    enable_prefix_caching: bool = True
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the model. Default: all cores.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share the target.")
    expert_parallel: bool = Field(
        False, description="Each rank holds some experts whole, in place of a share of every expert."
    )
    speculative_config: SpeculativeConfig | None = Field(None, description="None: plain decoding.")

    @model_validator(mode="after")
    def _experts_have_ranks(self) -> "EngineConfig":
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "expert_parallel is True, and tensor_parallel_size 1: one rank holds all experts; "
                "remove the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _draft_ranks_are_the_targets(self) -> "EngineConfig":
        speculative, size = self.speculative_config, self.tensor_parallel_size
        if speculative is None or speculative.method not in ("draft_model", "mtp"):
            return self
        draft_size = speculative.draft_tensor_parallel_size
        allowed = (size,) if speculative.method == "mtp" else (1, size)
        if draft_size is not None and draft_size not in allowed:
            raise ValueError(
                f"speculative_config.draft_tensor_parallel_size is {draft_size}, and tensor_parallel_size {size}: "
                f"use {' or '.join(str(each) for each in sorted(set(allowed)))}"
            )
        return self

    @model_validator(mode="after")
    def _step_holds_every_sequence(self) -> "EngineConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs, {self.max_num_seqs}: "
                "a step must hold one token of every sequence; raise the first or lower the second"
            )
        return self
