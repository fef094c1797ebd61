"""Configurations of the proposers, told apart by `method`."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LEAST_MEMORY_BYTES = 2**20

VerificationMode = Literal["auto", "rejection", "coupled"]
Placement = Literal["inline", "actor"]
DraftCount = Annotated[int, Field(ge=1, le=32)]


class _MethodConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_speculative_tokens: DraftCount | Literal["auto"] = Field(
        "auto",
        description="Drafts a sequence and step. auto: as many as pay in each step, none where none do.",
    )
    max_num_speculative_tokens: DraftCount = Field(8, description="The most that auto may choose.")
    verification: VerificationMode = Field(
        "auto",
        description="rejection keeps more soft drafts; coupled makes the text depend on the seed alone; "
        "auto verifies requests that carry a seed coupled, all others by rejection.",
    )

    placement: Placement = Field(
        "inline",
        description="Where drafts are made. inline: by rank 0, which verifies them; actor: in a process beside it.",
    )
    num_microbatches: int = Field(
        1,
        ge=1,
        le=2,
        description="Of placement actor. 2: half of the sequences are drafted for while the others are verified.",
    )
    draft_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Of placement actor. A step waits so long for drafts; then it goes on without, and the draft actor "
        "is started anew.",
    )

    @property
    def has_network(self) -> bool:
        """Its drafts are passes of a network, not lookups."""
        return False

    @property
    def draft_limit(self) -> int:
        """Drafts a sequence and step, at most: what sizes are chosen for."""
        number = self.num_speculative_tokens
        return self.max_num_speculative_tokens if number == "auto" else number

    def shares_drafter(self, tensor_parallel_size: int) -> bool:
        """Each of the target's ranks holds a share of the drafter; else rank 0 drafts alone."""
        return False

    @property
    def verification_mode(self) -> VerificationMode:
        """`verification` as it is carried out: from a draft actor come token ids alone, unless rejection is asked for.

        Distributions of a vocabulary's size, for every draft, would take longer on their way than most drafts.
        """
        is_apart = self.placement == "actor" and self.verification == "auto"
        return "coupled" if is_apart else self.verification

    @model_validator(mode="after")
    def _an_actor_for_its_options(self) -> Self:
        for name in ("num_microbatches", "draft_timeout_s"):
            if self.placement == "inline" and name in self.model_fields_set:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, which means nothing without a draft actor: "
                    "leave it out, or set placement to actor"
                )
        return self

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if self.num_speculative_tokens != "auto" and "max_num_speculative_tokens" in self.model_fields_set:
            raise ValueError(
                f"max_num_speculative_tokens is {self.max_num_speculative_tokens}, which means nothing beside "
                f"num_speculative_tokens {self.num_speculative_tokens}: leave it out, or set the latter to auto"
            )
        return self


class SuffixConfig(_MethodConfig):
    """Suffix decoding: what followed the longest earlier occurrence of the ending, as far as likely."""

    method: Literal["suffix"]
    memory_bytes: int = Field(
        0,
        ge=0,
        description="For past answers, 28 bytes a token, the oldest forgotten first; 0: none are remembered."
        " An answer is found by requests with the same API key, or with none as it had none.",
    )
    share_memory_across_keys: bool = Field(
        False,
        description="Past answers serve all requests. How fast an answer comes may then tell that it was given before.",
    )

    @model_validator(mode="after")
    def _memory_holds_answers(self) -> Self:
        if 0 < self.memory_bytes < LEAST_MEMORY_BYTES:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes}, which holds next to nothing: use {LEAST_MEMORY_BYTES} or more, "
                "or 0 for no memory"
            )
        if self.share_memory_across_keys and not self.memory_bytes:
            raise ValueError(
                "share_memory_across_keys is True, and memory_bytes 0: there is nothing to share; "
                "remove the first or raise the second"
            )
        return self


class NgramConfig(_MethodConfig):
    """Prompt lookup: what followed the longest earlier occurrence of the sequence's suffix."""

    method: Literal["ngram"]
    min_n: int = Field(2, ge=1, description="Shortest suffix that may match, in tokens.")
    max_n: int = Field(4, ge=1, description="Longest suffix tried, in tokens.")

    @model_validator(mode="after")
    def _ordered(self) -> "NgramConfig":
        if self.min_n > self.max_n:
            raise ValueError(f"min_n is {self.min_n}, above max_n, {self.max_n}: lower min_n or raise max_n")
        return self


class DraftModelConfig(_MethodConfig):
    """A smaller causal language model with the target's vocabulary."""

    method: Literal["draft_model"]
    model: str = Field(description="Folder, hub id or .gguf file of the draft model.")
    draft_tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that share the draft model: 1, which is rank 0, or as many as share the target."
    )

    @property
    def has_network(self) -> bool:
        return True

    def shares_drafter(self, tensor_parallel_size: int) -> bool:
        return self.placement == "inline" and self.draft_tensor_parallel_size == tensor_parallel_size

    @model_validator(mode="after")
    def _an_actor_is_one_process(self) -> Self:
        if self.placement == "actor" and self.draft_tensor_parallel_size > 1:
            raise ValueError(
                f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}, and placement actor: a draft actor "
                "is one process; use 1, or set placement to inline"
            )
        return self


class MTPConfig(_MethodConfig):
    """The target checkpoint's own multi-token prediction modules."""

    method: Literal["mtp"]
    max_num_speculative_tokens: DraftCount = Field(3, description="The most that auto may choose.")
    hidden_is_normed: bool = Field(
        True, description="The first module is given the target's hidden states after its final norm, not before it."
    )
    recycled_is_normed: bool = Field(
        True, description="Later drafts are given a module's output after its norm, not before it."
    )
    draft_tensor_parallel_size: int | None = Field(
        None, ge=1, description="Ranks that share the modules: as many as share the target, whose tensors they read."
    )

    @property
    def has_network(self) -> bool:
        return True

    def shares_drafter(self, tensor_parallel_size: int) -> bool:
        """Modules read the target's hidden states, embedding and head, of which every rank has its share."""
        return True

    @model_validator(mode="after")
    def _modules_stand_beside_the_target(self) -> Self:
        if self.placement == "actor":
            raise ValueError(
                "placement is actor, and mtp reads hidden states on the devices of the target's ranks: set it to inline"
            )
        return self


SpeculativeConfig = Annotated[SuffixConfig | NgramConfig | DraftModelConfig | MTPConfig, Field(discriminator="method")]
