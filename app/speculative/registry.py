"""The proposers, by the `method` of their configuration."""

from collections.abc import Callable
from typing import Any

from app.speculative import draft_model, mtp, ngram, suffix_proposer
from app.speculative.config import SpeculativeConfig
from app.speculative.loaded_proposer import LoadedProposer, TargetContext

PROPOSERS: dict[str, Callable[[Any, TargetContext], LoadedProposer]] = {
    "suffix": suffix_proposer.load,
    "ngram": ngram.load,
    "draft_model": draft_model.load,
    "mtp": mtp.load,
}


def load_proposer(config: SpeculativeConfig | None, target: TargetContext) -> LoadedProposer | None:
    """Loads what `config` names; None where nothing is to be speculated.

    Raises ValueError for a drafter that does not fit the target.
    """
    return None if config is None else PROPOSERS[config.method](config, target)
