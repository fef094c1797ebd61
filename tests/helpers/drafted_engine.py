"""An engine whose drafts are made elsewhere, which is in this process: what a draft actor does, without Ray."""

from typing import Any

from app.drafted_executor import DraftedExecutor
from app.drafter_loader import DrafterDescription, DrafterLoader
from app.engine.plan import StepPlan, StepResult
from app.engine.sequence_state import SequenceState
from app.engine_config import EngineConfig
from app.executor import LocalExecutor
from app.llm_engine import LLMEngine
from app.speculative.loaded_proposer import LoadedProposer
from app.speculative.proposer import Drafts
from app.speculative.remote_proposer import RemoteProposer
from app.speculative.sequence_mirror import MirrorImage
from app.worker_loader import load_worker


class ScriptedDrafter:
    """A `RemoteDrafter` that drafts at once, fails when it is told to, and takes `num_starting` looks to start."""

    def __init__(self, config: EngineConfig) -> None:
        self.loader = DrafterLoader(config)
        self.num_blocks = 0
        self.num_starting = 0
        self.num_restarts = 0
        self.fails = False
        self._looks = 0

    def has_started(self) -> bool:
        self._looks += 1
        return self._looks > self.num_starting

    def begin(self, image: MirrorImage) -> None:
        self._drafter = self.loader.build(self.num_blocks, image)

    def draft(self, plan: StepPlan, results: list[StepResult]) -> Drafts | Exception:
        if self.fails:
            return RuntimeError("the drafter is gone")
        return self._drafter.draft(plan, results)

    def restart(self) -> None:
        del self._drafter
        self.num_restarts += 1
        self.fails, self._looks = False, 0

    def shutdown(self) -> None:
        """Nothing outlives this process."""


def drafted(config: EngineConfig) -> tuple[LLMEngine, ScriptedDrafter]:
    drafter = ScriptedDrafter(config)
    worker, loaded = load_worker(config, progress=False, remote=_received(drafter.loader.describe()))
    drafter.num_blocks = loaded.num_blocks
    state = SequenceState(config.max_num_seqs, loaded.max_model_len, config.block_size)
    num_microbatches = config.speculative_config.num_microbatches
    executor = DraftedExecutor(LocalExecutor(worker), drafter, state, loaded.controller, num_microbatches)
    return LLMEngine.from_executor(config, executor, loaded), drafter


def _received(drafter: DrafterDescription) -> LoadedProposer:
    def receive(drafts: Any) -> Drafts:
        if isinstance(drafts, Exception):
            raise drafts
        return drafts

    return LoadedProposer(
        [],
        lambda context: RemoteProposer(receive, drafter.states_acceptance, context.device),
        drafter.soft_drafts,
        drafter.states_acceptance,
        draft_cost=drafter.draft_cost,
        elsewhere_token_bytes=drafter.token_bytes,
    )
