"""A character leaves when it is whole, once, whatever bytes come; nothing of the prompt ever does."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from app.engine.detokenizer import REPLACEMENT, Detokenizer
from tests.helpers.byte_tokenizers import BYTE_FALLBACK, BYTE_LEVEL, EMOJI, byte_ids, fallback_ids, pieces_of

EOS = 1
VOCAB_SIZE = len(BYTE_LEVEL)
HALF_TOKENS = [i for i in range(VOCAB_SIZE) if REPLACEMENT in BYTE_LEVEL.decode([i])]
REPRODUCIBLE = settings(max_examples=400, deadline=None, derandomize=True)


def make_detokenizer(prompt: list[int] | None = None, tokenizer=BYTE_LEVEL, skip: bool = True) -> Detokenizer:
    return Detokenizer(tokenizer.backend_tokenizer, byte_ids("p") if prompt is None else prompt, skip)


def stream(detokenizer: Detokenizer, runs: list[list[int]]) -> list[str]:
    """Text of each run, and last what `flush` adds."""
    return ["".join(detokenizer.push(run)) for run in runs] + [detokenizer.flush()]


@pytest.mark.parametrize("sizes", [[1], [2], [1, 3], [3, 1], [4], [9]])
def test_a_character_leaves_whole(sizes):
    """F06: four bytes in 2 + 2 and 1 + 3, over two steps and inside one."""
    texts = stream(make_detokenizer(), pieces_of(byte_ids(f"a{EMOJI}b{EMOJI}"), sizes))
    assert "".join(texts) == f"a{EMOJI}b{EMOJI}"
    assert not any(REPLACEMENT in text for text in texts)


def test_each_token_of_a_run_has_its_own_text():
    assert make_detokenizer().push(byte_ids("aé!")) == ["a", "", "é", "!"]


def test_half_a_character_at_the_end_is_one_replacement_character():
    for num_bytes in (1, 2, 3):
        token_ids = byte_ids(EMOJI)[:num_bytes]
        assert stream(make_detokenizer(), [token_ids]) == ["", REPLACEMENT] == ["", BYTE_LEVEL.decode(token_ids)]


def test_text_before_half_a_character_does_not_wait_for_it():
    token_id = next(i for i in HALF_TOKENS if BYTE_LEVEL.decode([i]).rstrip(REPLACEMENT))
    assert make_detokenizer().push([token_id]) == [BYTE_LEVEL.decode([token_id]).rstrip(REPLACEMENT)]


ANY_IDS = st.lists(
    st.one_of(
        st.sampled_from(HALF_TOKENS),
        st.integers(0, VOCAB_SIZE - 1),
        st.sampled_from([0, EOS]),
        st.sampled_from(byte_ids(EMOJI + "é€")),
    ),
    max_size=40,
)


def text_added(prompt: list[int], output: list[int], skip_special_tokens: bool) -> str:
    """What the output adds to the prompt's text, decoding both at once."""
    before = BYTE_LEVEL.decode(prompt, skip_special_tokens=skip_special_tokens)
    after = BYTE_LEVEL.decode(prompt + output, skip_special_tokens=skip_special_tokens)
    return after[len(os.path.commonprefix([before, after])) :]  # noqa: RUF071  two texts, no paths


@settings(REPRODUCIBLE, max_examples=1500)
@given(prompt=ANY_IDS, output=ANY_IDS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), skip=st.booleans())
def test_streamed_text_is_the_text_of_all_ids(prompt, output, sizes, skip):
    """F06, F07: no exception, nothing lost, nothing twice, nothing of the prompt, for any ids at all."""
    *texts, rest = stream(make_detokenizer(prompt, skip=skip), pieces_of(output, sizes))
    whole = "".join(texts) + rest
    assert whole == text_added(prompt, output, skip)
    assert rest in ("", REPLACEMENT, REPLACEMENT * 2, REPLACEMENT * 3), "more is held than one character's bytes"
    if not BYTE_LEVEL.decode(prompt, skip_special_tokens=skip).endswith(REPLACEMENT):
        assert whole == BYTE_LEVEL.decode(output, skip_special_tokens=skip)


@pytest.mark.parametrize("sizes", [[1], [5]])
@pytest.mark.parametrize("length", [1, 30, 300])
def test_a_prompt_that_ends_in_half_a_character_does_not_leak(length, sizes):
    """F07: the joined character is the answer's, the prompt's half is nobody's."""
    prompt = [*byte_ids("x" * length), *byte_ids(EMOJI)[:2]]
    joined = [*byte_ids(EMOJI)[2:], *byte_ids(" yes")]
    assert "".join(stream(make_detokenizer(prompt), pieces_of(joined, sizes))) == f"{EMOJI} yes"
    assert "".join(stream(make_detokenizer(prompt), pieces_of(byte_ids("no"), sizes))) == "no"
    assert stream(make_detokenizer(prompt), []) == [""]


def test_a_prompt_that_ends_in_many_bytes_of_a_fallback_vocabulary_joins_too():
    prompt = fallback_ids((EMOJI * 9).encode()[:-1])
    assert "".join(stream(make_detokenizer(prompt, BYTE_FALLBACK), [fallback_ids(EMOJI.encode()[-1:])])) == EMOJI


def test_a_space_between_prompt_and_answer_survives():
    hello, world = (BYTE_FALLBACK.convert_tokens_to_ids(token) for token in ("▁hello", "▁world"))
    assert stream(make_detokenizer([0, hello], BYTE_FALLBACK), [[world, hello]]) == [" world hello", ""]


@REPRODUCIBLE
@given(text=st.text(alphabet=st.sampled_from("aé\n你€😀"), max_size=12), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_bytes_of_a_fallback_vocabulary_stream_as_characters(text, sizes):
    prompt = [BYTE_FALLBACK.convert_tokens_to_ids("▁hello")]
    texts = stream(make_detokenizer(prompt, BYTE_FALLBACK), pieces_of(fallback_ids(text.encode()), sizes))
    assert "".join(texts) == text
    assert not any(REPLACEMENT in one for one in texts)


@REPRODUCIBLE
@given(token_ids=st.lists(st.one_of(st.integers(130, 257), st.integers(0, len(BYTE_FALLBACK) - 1)), max_size=40))
def test_a_fallback_vocabulary_bears_any_bytes(token_ids):
    text = "".join(stream(make_detokenizer([], BYTE_FALLBACK), [token_ids]))
    for word in ("▁hello", "▁world"):
        assert text.count(word[1:]) == token_ids.count(BYTE_FALLBACK.convert_tokens_to_ids(word))


def test_bytes_that_turn_a_run_invalid_do_not_take_back_text():
    token_ids = [*fallback_ids("你".encode() + b"\xff"), BYTE_FALLBACK.convert_tokens_to_ids("a")]
    assert BYTE_FALLBACK.decode(token_ids) == REPLACEMENT * 4 + "a", "the decoder itself goes back"
    assert "".join(stream(make_detokenizer([], BYTE_FALLBACK), [[i] for i in token_ids])) == f"你{REPLACEMENT}a"


def test_a_decoder_that_rewrites_earlier_text_costs_no_token_and_no_exception():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    assert Detokenizer(tokenizer, [], True).push([0, 1, 2, 0, 1, 2]) == ["a", "b", "c", "a", "b", "c"]


def test_a_token_without_text_does_not_part_two_words():
    hello, world = (BYTE_FALLBACK.convert_tokens_to_ids(token) for token in ("▁hello", "▁world"))
    outside = len(BYTE_FALLBACK) + 5  # a model's vocabulary is often padded beyond the tokenizer's
    for quiet in (outside, EOS):
        assert "".join(stream(make_detokenizer([hello], BYTE_FALLBACK), [[quiet], [world]])) == " world"


@pytest.mark.parametrize("num_before", range(20))
def test_a_long_run_of_broken_characters_is_told_one_by_one(num_before):
    """The window that is held moves on: no replacement character gets lost or told twice at its edge."""
    lead, *rest = byte_ids(EMOJI)
    token_ids = rest[:1] * num_before + [lead, *rest[:2]] * 3 + [lead, *rest, rest[0]]
    assert "".join(stream(make_detokenizer(), [token_ids])) == BYTE_LEVEL.decode(token_ids)


class CountingDetokenizer(Detokenizer):
    num_decoded = 0

    def _decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return super()._decode(token_ids)


@pytest.mark.parametrize("first", [[], byte_ids(EMOJI)[:2]])
@pytest.mark.parametrize("token_id", [byte_ids(EMOJI)[0], byte_ids(EMOJI)[1], EOS])
def test_work_stays_in_proportion_to_the_tokens(token_id, first):
    """Of 2000 tokens that never make a character, or have no text at all, only the last few are held."""
    detokenizer = CountingDetokenizer(BYTE_LEVEL.backend_tokenizer, byte_ids("p"), True)
    token_ids = first + [token_id] * 2000
    assert "".join(stream(detokenizer, [token_ids])) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    assert detokenizer.num_decoded < 2000 * 60
