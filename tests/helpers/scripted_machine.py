"""A target and a drafter whose costs and acceptances are scripted, for the draft-length controller."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.engine.plan import AdmittedSequence, ScheduledSequence, StepPlan, StepTimings
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.controller import DraftLengthController
from app.speculative.cost_model import CostModel
from app.speculative.proposer import Drafts, Verdict

MAX_K = 8
BLOCK_SIZE = 16
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@dataclass(frozen=True)
class OutlinedBatch:
    """What the controller reads of a batch."""

    slots: np.ndarray
    num_draft_tokens: np.ndarray
    num_tokens: int


@dataclass(frozen=True)
class Noise:
    """What a clock adds to a pass: jitter, spikes, a machine that gets slower and faster."""

    jitter: float = 0.0  # standard deviation of the logarithm
    spikes: float = 0.0  # share of passes that take three times as long
    drift: float = 0.0  # of the machine's speed, up and down in 2000 steps

    def speed(self, step: int) -> float:
        return 1.0 + self.drift * float(np.sin(2 * np.pi * step / 2000))

    def factor(self, rng: np.random.Generator) -> float:
        return float(np.exp(self.jitter * rng.standard_normal())) * (3.0 if rng.random() < self.spikes else 1.0)


@dataclass
class Machine:
    """`seconds` counts what steps cost without jitter, `plain_seconds` what plain decoding of their tokens would have.

    The controller is shown the noisy times. Requests of `request_length` tokens follow one another in each slot.
    """

    target: Callable[[int], float]
    drafter: Callable[[int], float] | None
    acceptance: np.ndarray  # [k] conditional
    num_seqs: int
    states_acceptance: bool = False  # drafts come before they are chosen, with the probability that they are kept
    found: float = 1.0  # share of the sequences and steps for which there are drafts at all
    seed: int = 0
    overstated: float = 0.0  # by how much stated probabilities are above the true ones
    noise: Noise = field(default_factory=Noise)
    request_length: int | None = None
    num_prompt_tokens: int = 1
    keeps_up: bool = False  # rows of steps without drafts are run later, unless the sequence is given up
    has_context: bool = False  # the drafter computes all tokens of a sequence before it drafts

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.clock = np.random.default_rng(self.seed + 1)
        self.state = SequenceState(self.num_seqs, 1 << 15, 1 << 15)
        self.seconds = self.plain_seconds = 0.0
        self.tokens = self.num_steps = 0
        self.missing = np.zeros(self.num_seqs, dtype=np.int64)  # rows that the drafter lacks
        self.followed = np.ones(self.num_seqs, dtype=bool)
        self.lengths = np.zeros(self.num_seqs, dtype=np.int64)  # tokens said

    def controller(self, wrong: float = 1.0) -> DraftLengthController:
        """Calibrated on this machine, its slopes by rows `wrong` times the true ones."""
        return DraftLengthController(
            self.num_seqs,
            MAX_K,
            calibrated(self.target, wrong),
            None if self.drafter is None else calibrated(self.drafter, wrong),
            self.states_acceptance,
            self.keeps_up,
        )

    def step(self, controller: DraftLengthController | None, fixed_k: int) -> None:
        plan = self._plan(fixed_k)
        self.state.apply(plan)
        if controller is not None:
            plan = controller.plan(self.state, plan)
        lengths = np.array([s.num_draft_tokens for s in plan.scheduled])
        self.followed[plan.given_up_slots] = False
        self.missing[~self.followed] = 0
        if self.keeps_up:
            assert not lengths[~self.followed].any()
        speed = self.noise.speed(self.num_steps)
        propose_s = self._propose_s(lengths) * speed
        token_ids = np.zeros((self.num_seqs, int(lengths.max(initial=0))), dtype=np.int64)
        has_drafts = self.rng.random(self.num_seqs) < self.found
        drafts = Drafts(token_ids, lengths * has_drafts)
        if self.states_acceptance:
            stated = np.minimum(self.acceptance[: token_ids.shape[1]] + self.overstated, 0.995)
            drafts = Drafts(token_ids, drafts.num_tokens, acceptance=np.tile(stated, (self.num_seqs, 1)))
            if controller is not None:
                drafts = controller.cut(self.state, plan, drafts)
        kept = np.cumprod(self.rng.random((self.num_seqs, MAX_K)) < self.acceptance, axis=1).sum(axis=1)
        accepted = np.minimum(kept, drafts.num_tokens)
        rows = self.num_seqs + int(drafts.num_tokens.sum())
        forward_s = self.target(rows) * speed
        num_tokens = self.num_seqs + int(accepted.sum())
        self.seconds += propose_s + forward_s
        self.plain_seconds += num_tokens / self.num_seqs * self.target(self.num_seqs) * speed
        self.tokens += num_tokens
        self.num_steps += 1
        if controller is not None:
            verdict = Verdict(
                np.zeros((self.num_seqs, MAX_K + 1)), accepted + 1, accepted, np.zeros(self.num_seqs, bool)
            )
            factor = self.noise.factor(self.clock), self.noise.factor(self.clock)
            timings = StepTimings(propose_s=propose_s * factor[0], forward_s=forward_s * factor[1])
            controller.observe(OutlinedBatch(np.arange(self.num_seqs), drafts.num_tokens, rows), verdict, timings)
        for slot in range(self.num_seqs):
            self.state.commit(slot, 1, np.full(accepted[slot] + 1, 5))
        self.lengths += accepted + 1
        # What was run for drafts that were kept is there, and the drafter has seen all others' last rows.
        if self.keeps_up:
            self.missing += np.where(self.followed, accepted + 1, 0)
        elif self.has_context:
            self.missing += np.where(lengths > 0, 1, accepted + 1)

    def run(self, num_steps: int, controller: DraftLengthController | None = None, fixed_k: int = MAX_K) -> float:
        """Tokens per second of so many steps more."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(num_steps):
            self.step(controller, fixed_k)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def run_against_plain(self, num_steps: int, controller: DraftLengthController) -> float:
        """Speed of so many steps more over that of plain decoding."""
        seconds, plain_seconds = self.seconds, self.plain_seconds
        self.run(num_steps, controller)
        return (self.plain_seconds - plain_seconds) / (self.seconds - seconds)

    def _plan(self, fixed_k: int) -> StepPlan:
        begins = self.num_steps == 0
        over = self.lengths >= self.request_length if self.request_length else np.zeros(self.num_seqs, dtype=bool)
        admitted = range(self.num_seqs) if begins else np.flatnonzero(over).tolist()
        released = [] if begins else np.flatnonzero(over).tolist()
        prompt = [5] * self.num_prompt_tokens
        for slot in admitted:
            # Streams do not end together.
            self.lengths[slot] = 0 if not begins or not self.request_length else slot * 7 % self.request_length
            self.followed[slot] = True
            self.missing[slot] = self.num_prompt_tokens if self.keeps_up or self.has_context else 0
        scheduled = [ScheduledSequence(slot, 1, fixed_k, []) for slot in range(self.num_seqs)]
        news = [
            AdmittedSequence(slot, prompt, 1, self.num_prompt_tokens - 1, [slot], SamplingParams(), 0, ())
            for slot in admitted
        ]
        return StepPlan(0, scheduled, news, released_slots=released)

    def _propose_s(self, lengths: np.ndarray) -> float:
        """Passes of the drafter: the first over the rows that it lacks, too."""
        if self.drafter is None:
            return 0.0
        depth = int(lengths.max(initial=0))
        passes = [int((lengths > each).sum()) for each in range(depth)]
        runs = lengths > 0
        if self.keeps_up:
            runs = self.followed if depth or self.missing.max() >= BLOCK_SIZE else np.zeros_like(self.followed)
        lacking = int(self.missing[runs].sum())
        self.missing[runs] = 0
        if self.has_context and passes:
            passes[0] = max(lacking, passes[0])
        elif self.keeps_up and lacking:
            # Settled rows are a pass of their own, and their outputs the first draft.
            passes = [lacking, *passes[1:]]
        return sum(self.drafter(num_rows) for num_rows in passes if num_rows)


def calibrated(cost: Callable[[int], float], wrong: float = 1.0) -> CostModel:
    first = cost(1)
    return CostModel(ROWS, [first + wrong * (cost(rows) - first) for rows in ROWS])
