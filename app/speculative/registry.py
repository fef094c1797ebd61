"""The proposers, by the `method` of their configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.speculative import draft_model, mtp, ngram, suffix_proposer
from app.speculative.config import SpeculativeConfig
from app.speculative.loaded_proposer import LoadedProposer, TargetContext
from models.drafters.deepseek_mtp import find_modules
from models.model_config import ModelConfig

PROPOSERS: dict[str, Callable[[Any, TargetContext], LoadedProposer]] = {
    "suffix": suffix_proposer.load,
    "ngram": ngram.load,
    "draft_model": draft_model.load,
    "mtp": mtp.load,
}


# What a method asks of its target, told from configuration and names alone.
CHECKS: dict[str, Callable[[Path, ModelConfig], object]] = {"mtp": find_modules}


def check_target(config: SpeculativeConfig | None, folder: Path, model_config: ModelConfig) -> None:
    """Raises ValueError for a target without the drafter that its checkpoint is to hold; reads no weight."""
    if config is not None and config.method in CHECKS:
        CHECKS[config.method](folder, model_config)


def load_proposer(config: SpeculativeConfig | None, target: TargetContext) -> LoadedProposer | None:
    """Loads what `config` names; None where nothing is to be speculated.

    Raises ValueError for a drafter that does not fit the target.
    """
    return None if config is None else PROPOSERS[config.method](config, target)
