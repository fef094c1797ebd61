"""A proposer away from its target."""

from app.engine.plan import StepPlan, StepResult
from app.speculative.proposer import Drafts, Proposer
from app.speculative.sequence_mirror import SequenceMirror


class DetachedDrafter:
    """Drafts for plans on their way to the target, from what results have told of the steps before.

    It sees every plan, and every result before the next plan for one of its sequences that is to have drafts.
    """

    def __init__(self, mirror: SequenceMirror, proposer: Proposer) -> None:
        self._mirror = mirror
        self._proposer = proposer

    def draft(self, plan: StepPlan, results: list[StepResult]) -> Drafts:
        """Drafts for `plan`, the next one; `results` are those that have come since the last."""
        for result in results:
            outline, verdict = self._mirror.commit(result)
            self._proposer.observe(outline, None, verdict)
        state = self._mirror.state
        self._proposer.catch_up(state, plan)
        self._mirror.apply(plan)
        return self._proposer.propose(state, plan)
