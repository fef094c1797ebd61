"""The ways of decoding that are measured, by name, and the engines that run them.

plain; a method of `speculative_config`; `suffix_memory`, which also remembers past answers; `random`, whose drafts
are drawn blindly, so that they cost what drafts cost and bring nothing. METHOD:K asks for K drafts.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.engine.batch import Batch
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.engine_config import EngineConfig
from app.executor import LocalExecutor
from app.llm_engine import LLMEngine
from app.speculative.proposer import Drafts, Verdict
from benchmarks.machine import REPOSITORY
from models.checkpoint import resolve_checkpoint

DEFAULT_MODEL = REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct"
MEMORY_BYTES = 16 * 2**20


class RandomProposer:
    """As many drafts as it may make, drawn evenly from the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)

    def catch_up(self, state: SequenceState, plan: StepPlan) -> None:
        """Nothing hangs on the last step."""

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def propose(self, state: SequenceState, plan: StepPlan) -> Drafts:
        num_tokens = np.array([scheduled.num_draft_tokens for scheduled in plan.scheduled], dtype=np.int64)
        shape = (len(num_tokens), int(num_tokens.max(initial=0)))
        return Drafts(self._rng.integers(0, self._vocab_size, shape), num_tokens)

    def observe(self, batch: Batch, hidden_states: torch.Tensor, verdict: Verdict) -> None:
        """Learns nothing."""

    def reset(self) -> None:
        """Knows nothing."""


def draft_number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def engine_fields(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig of a method.

    Raises ValueError where the method lacks its draft model.
    """
    fields = {
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.max_model_len,
        "num_threads": options.num_threads,
        "enable_prefix_caching": False,
    }
    name, _, number = method.partition(":")
    if name != "plain":
        speculative: dict[str, Any] = {"method": name}
        if name == "suffix_memory":
            speculative = {"method": "suffix", "memory_bytes": MEMORY_BYTES}
        elif name == "random":  # stands in n-gram lookup's place: neither costs passes or says what it expects
            speculative = {"method": "ngram"}
        if number:
            speculative["num_speculative_tokens"] = draft_number(number)
        elif options.num_speculative_tokens is not None:
            speculative["num_speculative_tokens"] = options.num_speculative_tokens
        if name == "draft_model":
            if options.draft_model is None:
                raise ValueError("--methods names draft_model: say which model drafts with --draft-model")
            speculative["model"] = options.draft_model
        fields["speculative_config"] = speculative
    return fields


def build_engine(method: str, fields: dict[str, Any]) -> LLMEngine:
    engine = LLMEngine(EngineConfig(**fields), progress=sys.stderr.isatty())
    if method.partition(":")[0] == "random":
        assert isinstance(engine.executor, LocalExecutor)
        engine.executor.worker.proposer = RandomProposer(engine.loaded.vocab_size)
    return engine


def check_model(model: str) -> Path:
    """The checkpoint's folder.

    Raises ValueError where the demonstration model has not been fetched.
    """
    if model == str(DEFAULT_MODEL) and not (DEFAULT_MODEL / "config.json").is_file():
        raise ValueError(f"there is no checkpoint at {DEFAULT_MODEL}: run `make model`, or name one with --model")
    return resolve_checkpoint(model, progress=sys.stderr.isatty())
