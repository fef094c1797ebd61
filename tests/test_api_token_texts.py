"""What single tokens say, in byte-level vocabularies and in those of SentencePiece."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from app.api.model_card import ModelCard
from app.api.token_texts import TextOffsets, TokenTexts
from tests.helpers.scripted_api import ScriptedApi, tiny_tokenizer
from tests.helpers.scripted_client import delta, logprob


@pytest.fixture(scope="module")
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: a space before the text, bytes for what the vocabulary lacks, BOS in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "f", "o", "x", "fo", "fox"]
    vocab = {piece: i for i, piece in enumerate([*pieces, "▁fox"])}
    merges = [("f", "o"), ("fo", "x"), ("▁", "fox")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


TEXTS = ["the quick brown fox", "tab\tand\nline", "naïve café", "🦊 fox 狐", "\x00\x7f\x80ÿ", "<|im_end|> x"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens_join_to_the_text(text):
    token_texts = TokenTexts(tiny_tokenizer())
    ids = tiny_tokenizer().encode(text)
    assert b"".join(token_texts.bytes_of(token_id) for token_id in ids).decode() == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_sentencepiece_tokens_join_to_the_text(sentencepiece_tokenizer, text):
    token_texts = TokenTexts(sentencepiece_tokenizer)
    ids = sentencepiece_tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_texts.bytes_of(token_id) for token_id in ids).decode() == " " + text


def test_every_byte_level_token_of_whole_characters_says_what_decoding_it_says():
    token_texts = TokenTexts(tiny_tokenizer())
    for token_id in range(len(tiny_tokenizer())):
        decoded = tiny_tokenizer().decode([token_id])
        if token_texts.is_whole(token_id):
            assert token_texts.text_of(token_id) == decoded
        else:
            assert "\N{REPLACEMENT CHARACTER}" in decoded
            assert token_texts.text_of(token_id).startswith("\\x")


def test_ids_of_a_padded_vocabulary_say_nothing():
    token_texts = TokenTexts(tiny_tokenizer())
    assert token_texts.bytes_of(100_000) == b""
    assert token_texts.text_of(100_000) == ""


def test_offsets_skip_special_tokens_only_where_the_text_does():
    token_texts = TokenTexts(tiny_tokenizer())
    ids = [1, *tiny_tokenizer().encode("a"), *tiny_tokenizer().encode("b")]
    skipping, counting = TextOffsets(token_texts, True, start=5), TextOffsets(token_texts, False)
    assert [skipping.advance(token_id) for token_id in ids] == [5, 5, 6]
    assert [counting.advance(token_id) for token_id in ids] == [0, 12, 13]


@pytest.mark.parametrize("as_text", [True, False])
async def test_offsets_of_an_echoed_prompt_fit_its_text(sentencepiece_tokenizer, as_text):
    """Neither BOS nor the space that the tokenizer puts before a text is in the echo."""
    (answer,) = sentencepiece_tokenizer.encode(" fox", add_special_tokens=False)[1:]

    def script(request):
        ids = request.prompt_token_ids
        yield [
            delta(
                " fox",
                [answer],
                logprobs=[logprob(answer)],
                finish="stop",
                prompt_logprobs=[None, *map(logprob, ids[1:])],
            )
        ]

    vocab_size = len(sentencepiece_tokenizer)
    api = ScriptedApi(script, tokenizer=sentencepiece_tokenizer, card=ModelCard(("tiny",), 64, vocab_size, 0))
    prompt = "fox a" if as_text else sentencepiece_tokenizer.encode("fox a")
    choice = (await api.openai.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=0)).choices[0]
    assert choice.text == "fox a fox"
    assert choice.logprobs.tokens == ["<s>", " fox", " ", "a", " fox"]
    assert choice.logprobs.text_offset == [0, 0, 3, 4, 5]
