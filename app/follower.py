"""The ranks that decide nothing."""

import torch

from app.engine.batch import Batch, commit_batch, step_batch
from app.engine.logprobs import prompt_pieces
from app.engine.model_runner import ModelRunner
from app.engine.plan import StepPlan
from app.engine.sequence_state import SequenceState
from app.speculative.led_drafter import DrafterFollower
from app.speculative.step_decision import STEP, StepDecision
from models import parallel


class Follower:
    """Runs its share of the target, and of a drafter whose weights are shared out, as rank 0 says.

    Knows the same of its slots as rank 0, one verdict later: what a step emitted arrives with the next one.
    """

    def __init__(
        self,
        state: SequenceState,
        model_runner: ModelRunner,
        drafter: DrafterFollower | None,  # None: rank 0 drafts alone
        device: torch.device,
    ) -> None:
        self.state = state
        self.model_runner = model_runner
        self.device = device
        self._drafter = drafter
        self._last_batch: Batch | None = None

    def speculative_step(self, plan: StepPlan) -> None:
        """This rank's part of the step that the plan describes."""
        decision = self.await_decision()
        if self._last_batch is not None:
            commit_batch(self.state, self._last_batch, decision.emitted_token_ids, decision.num_emitted)
        self.state.apply(plan)
        batch = step_batch(self.state, plan, decision.draft_token_ids, decision.num_drafts, self.device)
        output = self.model_runner.forward(batch)
        for piece in prompt_pieces(self.state, batch):
            self.model_runner.logits(output.hidden_states, piece.rows)
        self._last_batch = batch

    def await_decision(self) -> StepDecision:
        """Rank 0's next decision; until it comes, takes part in the drafter's passes."""
        while (message := parallel.listen())[0] != STEP:
            assert self._drafter is not None, "rank 0 drafts alone"
            self._drafter.take_part(message)
        return StepDecision.unpack(message)
