"""A scheduler over a real worker whose target and drafter read their own KV pools."""

import torch

from app.engine.kv_cache import KVCache
from app.engine.logits_processor import LogitsProcessor
from app.engine.model_runner import ModelRunner
from app.engine.plan import StepPlan, StepResult
from app.engine.sampler import Sampler
from app.engine.sequence_state import SequenceState
from app.speculative.draft_model import DraftModelProposer
from app.speculative.loaded_proposer import ProposerContext
from app.speculative.verifier import Verifier
from app.worker import Worker
from tests.helpers.kv_reading_model import CANARY, KVReadingModel
from tests.helpers.scripted_engine import ScriptedEngine

CPU = torch.device("cpu")


class DraftingWorker(Worker):
    """A worker that remembers what its proposer raised."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.faults: list[str] = []

    def step(self, plan: StepPlan) -> StepResult:
        result = self.speculative_step(plan)
        if result.drafter_fault is not None:
            self.faults.append(result.drafter_fault)
        return result


class DraftingEngine(ScriptedEngine):
    """`ScriptedEngine` with a draft model; `drafter` has the target's KV blocks and a pool of its own."""

    def __init__(self, target: KVReadingModel, drafter: KVReadingModel, verification="auto", **sizes) -> None:
        super().__init__(**sizes)
        limits, manager = self.scheduler.limits, self.block_manager
        drafter.max_num_rows = limits.max_num_batched_tokens
        self.drafter = drafter
        self.state = SequenceState(limits.max_num_seqs, limits.max_model_len, manager.block_size)
        pool = KVCache(target.kv_specs() + drafter.kv_specs(), manager.num_blocks, manager.block_size, CPU)
        for (layer,) in pool.layers:
            layer.fill_(CANARY)
        sampler = Sampler(LogitsProcessor(self.state))
        context = ProposerContext(
            self.state, sampler, verification, pool.layers[1:], manager.num_blocks, limits.max_num_batched_tokens, CPU
        )
        self.proposer = DraftModelProposer(drafter, drafter.vocab_size, target.vocab_size, context)
        self.worker = DraftingWorker(
            self.state,
            ModelRunner(target, pool.layers[:1]),
            Verifier(sampler, verification),
            self.proposer,
            None,
            target.vocab_size,
            CPU,
        )

    def texts(self, prompts: list[list[int]], params: list[dict]) -> list[list[int]]:
        """Runs the prompts together, to their ends."""
        sequences = [
            self.add(prompt, **{"temperature": 0.0, "max_tokens": 14, "ignore_eos": True, **each})
            for prompt, each in zip(prompts, params, strict=True)
        ]
        self.run()
        return [self.output(sequence) for sequence in sequences]
