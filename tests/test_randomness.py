"""Draws are uniform, independent, and functions of seed, position and purpose alone."""

import numpy as np
import pytest
import torch
from scipy import stats

from app.engine.randomness import Purpose, _mix, gumbels, gumbels_on_device, stream_keys, token_counters, uniforms

NUM = 20_000
MIN_P_VALUE = 1e-4
PINNED_KEYS = [12035550249420947055, 15922035233371858514, 4400442008235199446]
PINNED_NOISE = [1.5762167525388289, -0.18817032330647618, 0.887621599290925]


def draw(purpose: Purpose, seeds=5, positions=None) -> np.ndarray:
    positions = np.arange(NUM) if positions is None else positions
    return uniforms(np.broadcast_to(np.uint64(seeds), len(positions)), positions, purpose)


def assert_uniform(numbers: np.ndarray, bins: int = 100) -> None:
    counts = np.histogram(numbers, bins=bins, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE


def assert_independent(one: np.ndarray, other: np.ndarray, bins: int = 20) -> None:
    counts = np.histogram2d(one, other, bins=bins, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(counts.ravel()).pvalue > MIN_P_VALUE
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(one))


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_are_uniform_over_positions_and_over_seeds(purpose):
    assert_uniform(draw(purpose))
    seeds = np.arange(NUM, dtype=np.uint64)
    assert_uniform(uniforms(seeds, np.full(NUM, 17), purpose))
    assert stats.kstest(uniforms(seeds, np.full(NUM, 3), purpose), "uniform").pvalue > MIN_P_VALUE


def test_purposes_are_independent_streams():
    for one in Purpose:
        for other in Purpose:
            if one < other:
                assert_independent(draw(one), draw(other))
                assert_independent(draw(one)[1:], draw(other)[:-1])  # purposes of neighbouring positions


def test_neighbouring_positions_and_seeds_are_independent():
    numbers = draw(Purpose.ACCEPT)
    for lag in (1, 2, 8):
        assert_independent(numbers[lag:], numbers[:-lag])
    seeds = np.arange(NUM, dtype=np.uint64)
    for distance in (1, 1 << 32, 1 << 63):
        shifted = seeds + np.uint64(distance)
        at = np.full(NUM, 40)
        assert_independent(uniforms(seeds, at, Purpose.BONUS), uniforms(shifted, at, Purpose.BONUS))


def test_numbers_stay_strictly_inside_the_unit_interval(monkeypatch):
    """The uniform is never 0 or 1, whatever the bits are; and it has more than 24 of them."""
    extremes = np.array([0, 1, (1 << 11) - 1, 2**64 - 1, 2**64 - (1 << 11)], dtype=np.uint64)
    monkeypatch.setattr("app.engine.randomness.stream_keys", lambda *_: extremes)
    numbers = uniforms(extremes, extremes, Purpose.ACCEPT)
    assert ((numbers > 0) & (numbers < 1)).all()
    monkeypatch.undo()
    assert ((draw(Purpose.ACCEPT) * 2**53) % 2**29 > 0).mean() > 0.99


def test_a_draw_depends_on_its_counters_alone():
    seeds, positions = np.array([3, 9, 3], dtype=np.uint64), np.array([5, 6, 7])
    together = uniforms(seeds, positions, Purpose.DRAFT)
    for i in (2, 0, 1):
        assert uniforms(seeds[i : i + 1], positions[i : i + 1], Purpose.DRAFT)[0] == together[i]
    keys = np.concatenate([stream_keys(seeds, positions, purpose) for purpose in Purpose])
    assert len(set(keys.tolist())) == len(keys)


def test_the_numbers_never_change():
    """A seed's text must be the same in the next release."""
    seeds, positions = np.array([0, 7, 2**64 - 1], dtype=np.uint64), np.array([0, 1, 100_000])
    assert stream_keys(seeds, positions, Purpose.DRAFT).tolist() == PINNED_KEYS
    noise = gumbels(stream_keys(seeds, positions, Purpose.COUPLED), token_counters(np.array([0, 1, 49151])))
    np.testing.assert_allclose(noise, PINNED_NOISE, rtol=1e-12)


def test_splitmix64_is_the_published_one():
    """First outputs of the reference implementation for the start 1234567."""
    states = (np.arange(1, 4).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + np.uint64(1234567)
    assert _mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_noise_is_the_same_on_a_device(device):
    """The uniforms bit for bit; the logarithms to the last bits of fp64."""
    vocab_size = 3000
    keys = stream_keys(np.arange(3, dtype=np.uint64), np.array([4, 5, 6]), Purpose.COUPLED)
    ours = gumbels(keys[:, None], token_counters(np.arange(vocab_size)))
    theirs = gumbels_on_device(torch.from_numpy(keys.view(np.int64)).to(device), vocab_size).cpu().numpy()
    np.testing.assert_allclose(theirs, ours, rtol=1e-14, atol=1e-15)


def test_noise_is_standard_gumbel_and_independent_between_tokens_and_rows():
    keys = stream_keys(np.full(2, 11, dtype=np.uint64), np.array([8, 9]), Purpose.COUPLED)
    noise = gumbels(keys[:, None], token_counters(np.arange(49152)))
    assert stats.kstest(noise[0], "gumbel_r").pvalue > MIN_P_VALUE
    cdf = stats.gumbel_r.cdf(noise)
    assert_independent(cdf[0], cdf[1])
    assert_independent(cdf[0, 1:], cdf[0, :-1])


def test_noise_of_some_tokens_is_theirs_in_the_whole_vocabulary():
    keys = stream_keys(np.array([1], dtype=np.uint64), np.array([2]), Purpose.COUPLED)
    tokens = np.array([3, 77, 4000])
    whole = gumbels(keys[:, None], token_counters(np.arange(5000)))[0]
    assert (gumbels(keys, token_counters(tokens)) == whole[tokens]).all()
