"""The rank that decides: the target, its drafter and the state of their sequences."""

import logging
import time
import traceback
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.batch import Batch, commit_batch, step_batch
from app.engine.logprobs import prompt_pieces, token_logprobs
from app.engine.model_runner import ModelOutput, ModelRunner
from app.engine.plan import SequenceResult, StepPlan, StepResult, StepTimings, TokenLogprobs
from app.engine.sequence_state import SequenceState
from app.speculative.controller import DraftLengthController
from app.speculative.proposer import Drafts, Proposer, Verdict
from app.speculative.step_decision import StepDecision
from app.speculative.verifier import Verifier
from models import parallel

logger = logging.getLogger(__name__)


class Worker:
    """Rank 0, often the only one: decides what is drafted, accepted and said, and tells the others once a step.

    `speculative_step` is its one hot method.
    """

    def __init__(
        self,
        state: SequenceState,
        model_runner: ModelRunner,
        verifier: Verifier,
        proposer: Proposer | None,
        controller: DraftLengthController | None,  # None: the plan's draft lengths stand
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.state = state
        self.vocab_size = vocab_size
        self.model_runner = model_runner
        self.verifier = verifier
        self.proposer = proposer
        self.controller = controller
        self.device = device
        self.num_refused_drafts = dict.fromkeys(("controller", "proposer", "fault"), 0)  # of those that the plans allow
        self.num_drafter_restarts = 0
        self._fault_logged = False
        self._last_verdict = Verdict.nothing()

    def speculative_step(self, plan: StepPlan) -> StepResult:
        """Propose, verify, reject, commit: one step of every scheduled sequence."""
        clock = _PhaseClock()
        drafter_fault = self._catch_up(plan)
        self.state.apply(plan)
        drafts, fault = self._propose(plan)
        drafter_fault = fault or drafter_fault
        self._tell_followers(drafts)
        clock.lap("propose_s")
        batch = step_batch(self.state, plan, drafts.token_ids, drafts.num_tokens, self.device)
        output = self.model_runner.forward(batch)
        clock.lap("forward_s")
        verdict = self.verifier.verify(output.logits, batch, drafts)
        clock.lap("verify_s")
        results = self._results(batch, output, verdict)
        commit_batch(self.state, batch, verdict.emitted_token_ids, verdict.num_emitted)
        drafter_fault = self._observe(batch, output, verdict) or drafter_fault
        clock.lap("commit_s")
        clock.timings.num_rows = batch.num_tokens
        if self.controller is not None:
            self.controller.observe(batch, verdict, clock.timings)
        self._last_verdict = verdict
        drafts_pay = self.controller is None or self.controller.follows_all
        return StepResult(
            plan.step_id, results, clock.timings, drafter_fault, drafts.blind_block_ids if drafts_pay else ()
        )

    def stats(self) -> dict[str, float]:
        """Drafts refused, restarts of the drafter; the controller's totals and gains, where draft lengths are auto."""
        stats: dict[str, float] = {f"num_refused_{reason}": num for reason, num in self.num_refused_drafts.items()}
        stats["num_drafter_restarts"] = self.num_drafter_restarts
        if self.controller is not None:
            stats |= self.controller.stats()
        return stats

    def _catch_up(self, plan: StepPlan) -> str | None:
        if self.proposer is None:
            return None
        try:
            self.proposer.catch_up(self.state, plan)
        except Exception:
            return self._drafter_fault()
        return None

    def _propose(self, plan: StepPlan) -> tuple[Drafts, str | None]:
        if self.proposer is None:
            return Drafts.none(len(plan.scheduled)), None
        num_left = plan.num_draft_tokens
        try:
            if self.controller is not None:
                plan = self._without_vain(plan)
                num_left = self._refuse("proposer", num_left, plan.num_draft_tokens)
                plan = self.controller.plan(self.state, plan)
                num_left = self._refuse("controller", num_left, plan.num_draft_tokens)
            drafts = self.proposer.propose(self.state, plan)
            self._check(drafts, plan)
            num_left = self._refuse("proposer", num_left, int(drafts.num_tokens.sum()))
            if self.controller is not None:
                drafts = self.controller.cut(self.state, plan, drafts)
                self._refuse("controller", num_left, int(drafts.num_tokens.sum()))
            return drafts, None
        except Exception:
            self._refuse("fault", num_left, 0)
            return Drafts.none(len(plan.scheduled)), self._drafter_fault()

    def _without_vain(self, plan: StepPlan) -> StepPlan:
        """The plan without drafts for sequences that the proposer has nothing to draft from."""
        assert self.proposer is not None
        can_draft = self.proposer.can_draft(np.array([s.slot for s in plan.scheduled], dtype=np.int64))
        if can_draft.all():
            return plan
        return plan.with_draft_lengths(
            [s.num_draft_tokens if can else 0 for s, can in zip(plan.scheduled, can_draft.tolist(), strict=True)]
        )

    def _tell_followers(self, drafts: Drafts) -> None:
        if parallel.tp_size() > 1:
            parallel.tell(StepDecision.of(self._last_verdict, drafts).packed())

    def _refuse(self, reason: str, num_before: int, num_after: int) -> int:
        """Counts the drafts that `reason` leaves out, and returns how many are left."""
        self.num_refused_drafts[reason] += num_before - num_after
        return num_after

    def _check(self, drafts: Drafts, plan: StepPlan) -> None:
        """A draft that the plan has no room for, or that is no token of the target, is the proposer's fault."""
        num_allowed = np.array([s.num_draft_tokens for s in plan.scheduled], dtype=np.int64)
        assert ((drafts.num_tokens >= 0) & (drafts.num_tokens <= num_allowed)).all(), "more drafts than planned"
        token_ids = drafts.token_ids[np.arange(drafts.token_ids.shape[1]) < drafts.num_tokens[:, None]]
        assert ((token_ids >= 0) & (token_ids < self.vocab_size)).all(), "a draft outside the vocabulary"

    def _observe(self, batch: Batch, output: ModelOutput, verdict: Verdict) -> str | None:
        if self.proposer is None:
            return None
        try:
            self.proposer.observe(batch, output.hidden_states, verdict)
        except Exception:
            return self._drafter_fault()
        return None

    def _drafter_fault(self) -> str:
        """Speculation may fail, serving may not: says what happened and lets the proposer start clean."""
        assert self.proposer is not None
        fault = traceback.format_exc()
        if not self._fault_logged:
            logger.error("The proposer failed; this step goes on without drafts. Later faults are counted.\n%s", fault)
            self._fault_logged = True
        self.proposer.reset()
        if self.controller is not None:
            self.controller.drafter_starts_anew()
        self.num_drafter_restarts += 1
        return fault

    def _results(self, batch: Batch, output: ModelOutput, verdict: Verdict) -> list[SequenceResult]:
        emitted = verdict.emitted_token_ids.tolist()
        num_emitted, num_accepted = verdict.num_emitted.tolist(), verdict.num_accepted.tolist()
        num_drafted, failed = batch.num_draft_tokens.tolist(), verdict.failed.tolist()
        logprobs = self._logprobs(batch, output, verdict)
        prompt_logprobs = self._prompt_logprobs(batch, output)
        return [
            SequenceResult(
                slot=slot,
                token_ids=emitted[i][: num_emitted[i]],
                num_drafted=num_drafted[i],
                num_accepted=num_accepted[i],
                logprobs=logprobs.get(i),
                prompt_logprobs=prompt_logprobs.get(i),
                error="the model's logits are not numbers (NaN) at this position" if failed[i] else None,
            )
            for i, slot in enumerate(batch.slots.tolist())
        ]

    def _logprobs(self, batch: Batch, output: ModelOutput, verdict: Verdict) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of the emitted tokens of the sequences that asked, by index in the batch."""
        logprobs = {}
        first_rows = np.cumsum(batch.num_logits_rows) - batch.num_logits_rows
        for i, slot in enumerate(batch.slots.tolist()):
            params, num = self.state.sampling_params[slot], int(verdict.num_emitted[i])
            if params is not None and params.logprobs is not None and num:
                rows = output.logits[first_rows[i] : first_rows[i] + num]
                logprobs[i] = token_logprobs(rows, verdict.emitted_token_ids[i, :num], params.logprobs)
        return logprobs

    def _prompt_logprobs(self, batch: Batch, output: ModelOutput) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of prompt tokens that follow this step's rows, where asked, by index in the batch."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for piece in prompt_pieces(self.state, batch):
            params = self.state.sampling_params[batch.slots[piece.index]]
            assert params is not None
            assert params.prompt_logprobs is not None
            logits = self.model_runner.logits(output.hidden_states, piece.rows)
            entries = token_logprobs(logits, piece.token_ids, params.prompt_logprobs)
            logprobs.setdefault(piece.index, []).extend(entries)
        return logprobs


@dataclass
class _PhaseClock:
    """Splits a step's time among its phases."""

    def __post_init__(self) -> None:
        self.timings = StepTimings()
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        setattr(self.timings, phase, now - self._last)
        self._last = now
