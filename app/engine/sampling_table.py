"""Sampling parameters of the slots, as arrays."""

import numpy as np

from app.engine.sampling_params import SamplingParams
from app.engine.sequence_state import SequenceState


class SamplingTable:
    """A struct of arrays over `state.sampling_params`; every array's first dimension is the slot.

    `refresh` reads a slot anew when it holds another request, so that choosing the rows that want a given treatment
    is one indexing and costs the others nothing.
    """

    def __init__(self, state: SequenceState) -> None:
        num_slots = len(state.sampling_params)
        self._state = state
        self._read: list[tuple[SamplingParams, tuple[int, ...]] | None] = [None] * num_slots
        self.is_greedy = np.zeros(num_slots, dtype=bool)
        self.is_seeded = np.zeros(num_slots, dtype=bool)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.min_p = np.zeros(num_slots, dtype=np.float32)
        self.repetition_penalty = np.ones(num_slots, dtype=np.float32)
        self.presence_penalty = np.zeros(num_slots, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_slots, dtype=np.float32)
        self.min_tokens = np.zeros(num_slots, dtype=np.int64)
        self.has_bias = np.zeros(num_slots, dtype=bool)
        self.has_bad_words = np.zeros(num_slots, dtype=bool)
        self.edits_every_row = np.zeros(num_slots, dtype=bool)  # bias, penalties or bad words
        self.shapes = np.zeros(num_slots, dtype=bool)  # sampled, by another distribution than plain softmax
        self.bias: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int64), np.zeros(0, np.float32))] * num_slots
        self.bad_words: list[list[np.ndarray]] = [[]] * num_slots
        self.stop_token_ids: list[np.ndarray] = [np.zeros(0, np.int64)] * num_slots

    def refresh(self, slots: np.ndarray) -> None:
        """Makes the arrays right for occupied `slots`."""
        for slot in slots.tolist():
            params, stop_token_ids = self._state.sampling_params[slot], self._state.stop_token_ids[slot]
            assert params is not None, f"slot {slot} is free"
            read = self._read[slot]
            if read is None or read[0] is not params or read[1] is not stop_token_ids:
                self._read_slot(slot, params, stop_token_ids)

    def _read_slot(self, slot: int, params: SamplingParams, stop_token_ids: tuple[int, ...]) -> None:
        self._read[slot] = (params, stop_token_ids)
        self.is_greedy[slot] = params.is_greedy
        self.is_seeded[slot] = params.seed is not None
        for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            getattr(self, name)[slot] = getattr(params, name)
        self.temperature[slot] = 1.0 if params.is_greedy else params.temperature
        self.min_tokens[slot] = params.min_tokens if stop_token_ids else 0
        self.bias[slot] = (
            np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias)),
            np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
        )
        self.bad_words[slot] = [np.asarray(word, dtype=np.int64) for word in params.bad_words_token_ids if word]
        self.stop_token_ids[slot] = np.asarray(stop_token_ids, dtype=np.int64)
        self.has_bias[slot] = bool(params.logit_bias)
        self.has_bad_words[slot] = bool(self.bad_words[slot])
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self.edits_every_row[slot] = self.has_bias[slot] or self.has_bad_words[slot] or penalised
        self.shapes[slot] = not params.is_greedy and (
            params.temperature != 1 or params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        )
