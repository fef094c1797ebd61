"""Counter-based randomness: a draw is a function of seed, position in the sequence and purpose, of nothing else.

Batch mates, batch size, preemption, earlier draws and the number of ranks therefore never shift it. A position that is
drafted again in a later step meets the same numbers again; that is no bias, since what was emitted before it never
depended on them.

Numbers come from SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): output
n of a stream is a bijective mix of start + n * golden gamma. The start is the mixed seed, n counts (position, purpose);
noise over a vocabulary is a further stream that starts at that output, with n = 1 + token id.
"""

from enum import IntEnum

import numpy as np
import torch

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_PURPOSES_A_POSITION = 8  # room for more purposes that leaves the numbers of the present ones as they are


class Purpose(IntEnum):
    """What a draw is for; purposes are independent streams."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3
    COUPLED = 4


def stream_keys(
    seeds: np.ndarray,  # [n] uint64
    positions: np.ndarray,  # [n] int64: index in the sequence of the token that is drawn
    purpose: Purpose,
) -> np.ndarray:
    """64 random bits for each draw; uint64 [n]."""
    counters = positions.astype(np.uint64) * np.uint64(_PURPOSES_A_POSITION) + np.uint64(purpose + 1)
    starts = _mix(seeds.astype(np.uint64) + np.uint64(_GOLDEN_GAMMA))
    return _mix(starts + counters * np.uint64(_GOLDEN_GAMMA))


def uniforms(seeds: np.ndarray, positions: np.ndarray, purpose: Purpose) -> np.ndarray:
    """A number strictly inside (0, 1) for each draw, an odd multiple of 2**-53; float64 [n]."""
    return _unit_interval(stream_keys(seeds, positions, purpose))


def token_counters(token_ids: np.ndarray) -> np.ndarray:
    """What distinguishes tokens to `gumbels`; uint64, of the shape of `token_ids`."""
    return (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA)


def gumbels(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of tokens, by their `counters`, in the streams that start at `keys`, which broadcast."""
    noise = _unit_interval(_mix(keys + counters))
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def gumbels_on_device(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`gumbels` of the whole vocabulary, computed on the device of `keys` (int64 [n]); float64 [n, vocab_size].

    Integer arithmetic wraps alike everywhere, so the uniforms are those of `gumbels` bit for bit; the logarithm of
    another device may differ in the last of its 53 bits.
    """
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GOLDEN_GAMMA)
    bits = keys[:, None] + counters
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        bits ^= _shift_right(bits, shift)
        bits *= _signed(multiplier)
    bits ^= _shift_right(bits, _SHIFTS[2])
    noise = (_shift_right(bits, 11) | 1).to(torch.float64).mul_(2.0**-53)
    return noise.log_().neg_().log_().neg_()


def _mix(bits: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, in place; uint64."""
    shifted = np.empty_like(bits)
    for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
        np.right_shift(bits, np.uint64(shift), out=shifted)
        bits ^= shifted
        bits *= np.uint64(multiplier)
    np.right_shift(bits, np.uint64(_SHIFTS[2]), out=shifted)
    bits ^= shifted
    return bits


def _unit_interval(bits: np.ndarray) -> np.ndarray:
    return ((bits >> np.uint64(11)) | np.uint64(1)).astype(np.float64) * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical shift of int64, whose own shift repeats the sign bit."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)
