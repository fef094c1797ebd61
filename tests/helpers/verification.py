"""Verification without a network: sequences in slots, logits from a table, distributions computed the slow way."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats

from app.engine.batch import Batch, build_batch
from app.engine.logits_processor import LogitsProcessor, LogitsRows
from app.engine.plan import AdmittedSequence
from app.engine.sampler import Sampler
from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState
from app.speculative.config import VerificationMode
from app.speculative.proposer import Drafts, Verdict
from app.speculative.verifier import Verifier, is_coupled

CPU = torch.device("cpu")
LogitsOf = Callable[[np.ndarray], torch.Tensor]  # last tokens [num_rows] to logits [num_rows, vocab_size]


def as_drafts(token_ids: Sequence[Sequence[int]], probs: torch.Tensor | None = None) -> Drafts:
    num_tokens = np.array([len(row) for row in token_ids], dtype=np.int64)
    padded = np.zeros((len(token_ids), num_tokens.max(initial=0)), dtype=np.int64)
    for i, row in enumerate(token_ids):
        padded[i, : len(row)] = row
    return Drafts(padded, num_tokens, probs)


class Bench:
    """Sequences that are ready to decode, one a slot, and what verification says to their drafts."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]] | None = None,  # emitted already
        seeds: Sequence[int] | None = None,  # default: 0, 1, ...; a request's own seed goes before
        stop_token_ids: tuple[int, ...] = (),
        mode: VerificationMode = "auto",
        max_model_len: int = 64,
    ) -> None:
        num_seqs = len(params)
        self.state = SequenceState(num_seqs, max_model_len, block_size=max_model_len)
        self.sampler = Sampler(LogitsProcessor(self.state))
        self.verifier = Verifier(self.sampler, mode)
        self.mode = mode
        self.slots = np.arange(num_seqs)
        for slot in range(num_seqs):
            tokens = [*prompts[slot], *(outputs[slot] if outputs else ())]
            own = params[slot].seed
            seed = own if own is not None else seeds[slot] if seeds else slot
            self.state.admit(
                AdmittedSequence(
                    slot, tokens, len(prompts[slot]), len(tokens) - 1, [slot], params[slot], seed, stop_token_ids
                )
            )

    def batch(self, drafts: Drafts) -> Batch:
        starts = self.state.num_computed_tokens[self.slots]
        ones = np.ones_like(starts)
        return build_batch(
            self.state, self.slots, starts, ones, drafts.token_ids, drafts.num_tokens, ones.astype(bool), CPU
        )

    def verify(self, drafts: Drafts, logits: torch.Tensor) -> Verdict:
        """`logits` are those of each sequence's 1 + drafts rows, one below the other."""
        return self.verifier.verify(logits, self.batch(drafts), drafts)

    def commit(self, verdict: Verdict) -> None:
        for slot in self.slots.tolist():
            emitted = verdict.emitted_token_ids[slot, : verdict.num_emitted[slot]]
            self.state.commit(slot, 1, emitted)

    def draw_drafts(self, logits_of: LogitsOf, num_drafts: Sequence[int]) -> Drafts:
        """What a drafter with these logits would draw, as the draft model's proposer does it."""
        width = max(num_drafts)
        token_ids = np.zeros((len(self.slots), width), dtype=np.int64)
        probs: torch.Tensor | None = None
        self.sampler.table.refresh(self.slots)
        coupled = is_coupled(self.mode, self.sampler, self.slots)
        last = self.state.token_ids[self.slots, self.state.num_tokens - 1]
        for depth in range(width):
            rows = LogitsRows(self.slots, token_ids, np.full(len(self.slots), depth))
            drawn = self.sampler.draw_drafts(logits_of(last), rows, coupled)
            token_ids[:, depth] = last = drawn.token_ids
            if drawn.probs is not None:
                if probs is None:
                    probs = torch.zeros((*token_ids.shape, drawn.probs.shape[1]))
                soft = np.flatnonzero(drawn.prob_rows >= 0)
                probs[soft, depth] = drawn.probs[drawn.prob_rows[soft]]
        return Drafts(token_ids, np.array(num_drafts, dtype=np.int64), probs)

    def step(self, drafts: Drafts, logits_of: LogitsOf) -> Verdict:
        """Verifies against a target whose logits depend on the last token, and commits."""
        batch = self.batch(drafts)
        verdict = self.verifier.verify(logits_of(batch.token_ids.numpy()), batch, drafts)
        self.commit(verdict)
        return verdict

    def outputs(self) -> list[list[int]]:
        state = self.state
        return [state.token_ids[s, state.num_prompt_tokens[s] : state.num_tokens[s]].tolist() for s in self.slots]


def reference_probs(
    logits: np.ndarray,  # [vocab_size]
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    stop_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """The distribution that a request asks for, token by token in fp64, as its definition reads."""
    scores = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for word in params.bad_words_token_ids:
        if list(output)[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            scores[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        scores[list(stop_token_ids)] = -np.inf
    if params.is_greedy:
        return np.eye(len(scores))[scores.argmax()]
    probs = np.exp((scores - scores.max()) / params.temperature)
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


def reference_joint(
    table: np.ndarray,  # [vocab_size, vocab_size]: logits by last token
    prompt: Sequence[int],
    num_tokens: int,
    params: SamplingParams,
    stop_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """Probability of every output of `num_tokens` tokens: [vocab_size] * num_tokens."""
    joint = np.zeros((len(table),) * num_tokens)

    def extend(output: list[int], prob: float) -> None:
        if len(output) == num_tokens:
            joint[tuple(output)] = prob
            return
        probs = reference_probs(table[(*prompt, *output)[-1]], prompt, output, params, stop_token_ids)
        for token in np.flatnonzero(probs):
            extend([*output, int(token)], prob * probs[token])

    extend([], 1.0)
    return joint


def chi_square_p(observed: np.ndarray, probs: np.ndarray) -> float:
    """p-value of counts under `probs`, cells that expect fewer than 5 pooled; 0 where the impossible happened."""
    observed, probs = observed.ravel(), probs.ravel() / probs.sum()
    if observed[probs == 0].any():
        return 0.0
    expected = probs * observed.sum()
    small = expected < 5
    cells = [*zip(observed[~small], expected[~small], strict=True)]
    if expected[small].sum() > 0:
        cells.append((observed[small].sum(), expected[small].sum()))
    if len(cells) < 2:
        return 1.0
    counts, wanted = zip(*cells, strict=True)
    return float(stats.chisquare(counts, wanted).pvalue)


def histogram(samples: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts of rows of `samples` [n, num_tokens]."""
    counts = np.zeros((vocab_size,) * samples.shape[1], dtype=np.int64)
    np.add.at(counts, tuple(samples.T), 1)
    return counts
