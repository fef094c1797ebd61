"""Configurations of the proposers, told apart by `method`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

VerificationMode = Literal["auto", "rejection", "coupled"]


class _MethodConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_speculative_tokens: int = Field(4, ge=1, le=32, description="Drafts a sequence and step, at most.")
    verification: VerificationMode = Field(
        "auto",
        description="rejection keeps more soft drafts; coupled makes the text depend on the seed alone; "
        "auto verifies requests that carry a seed coupled, all others by rejection.",
    )


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


SpeculativeConfig = Annotated[NgramConfig | DraftModelConfig, Field(discriminator="method")]
