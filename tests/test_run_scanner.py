"""The end of an emitted run cuts text, ids, logprobs and reason at one token; text never shows half of anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.plan import TokenLogprobs
from app.engine.run_scanner import RunScanner, ScannedRun, StopStrings
from app.engine.sampling_params import SamplingParams
from tests.helpers.byte_tokenizers import BYTE_LEVEL, byte_ids, pieces_of

EOS = 1
REPRODUCIBLE = settings(max_examples=300, deadline=None, derandomize=True)


def make_scanner(
    tokenizer=BYTE_LEVEL, prompt: list[int] | None = None, max_model_len: int = 10_000, **params
) -> RunScanner:
    return RunScanner(tokenizer, SamplingParams(**params), (EOS,), prompt or byte_ids("p"), max_model_len)


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -1.0, 1, []) for token_id in token_ids]


def scan_all(scanner: RunScanner, runs: list[list[int]]) -> ScannedRun:
    """All runs to the first that ends, joined; what is held back at the end is lost, as in a stream that is cut."""
    token_ids: list[int] = []
    text = ""
    for run in runs:
        scanned = scanner.scan(run, logprobs_of(run))
        assert scanned.logprobs is not None
        assert [entry.token_id for entry in scanned.logprobs] == scanned.token_ids
        token_ids, text = token_ids + scanned.token_ids, text + scanned.text
        if scanned.finish_reason is not None:
            return ScannedRun(token_ids, None, text, scanned.finish_reason, scanned.stop_reason)
    return ScannedRun(token_ids, None, text)


def test_an_eos_within_the_budget_goes_before_the_length():
    """B01, first case."""
    result = scan_all(make_scanner(max_tokens=10), [byte_ids("12345678"), [EOS, *byte_ids("ab")]])
    assert (len(result.token_ids), result.text, result.finish_reason) == (9, "12345678", "stop")
    assert result.stop_reason is None


def test_an_eos_past_the_budget_is_not_seen():
    """B01, second case."""
    result = scan_all(make_scanner(max_tokens=10), [byte_ids("1234567"), [*byte_ids("abc"), EOS]])
    assert (len(result.token_ids), result.text, result.finish_reason) == (10, "1234567abc", "length")


def test_an_eos_at_the_last_token_is_a_stop():
    result = scan_all(make_scanner(max_tokens=3), [[*byte_ids("ab"), EOS, *byte_ids("c")]])
    assert (len(result.token_ids), result.finish_reason) == (3, "stop")


@pytest.mark.parametrize("size", [1, 2, 5, 17])
@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_max_tokens_is_met_exactly_whatever_the_runs(max_tokens, size):
    """B04."""
    runs = pieces_of([*byte_ids("abcdefgh"), EOS, *byte_ids("ijklmnopqrst")], [size])
    result = scan_all(make_scanner(max_tokens=max_tokens, ignore_eos=True), runs)
    assert (len(result.token_ids), result.finish_reason) == (max_tokens, "length")
    assert result.text == BYTE_LEVEL.decode(result.token_ids, skip_special_tokens=True)


def test_the_context_ends_a_run_like_max_tokens():
    scanner = make_scanner(prompt=byte_ids("prompt"), max_model_len=10, max_tokens=None)
    result = scan_all(scanner, [byte_ids("abc"), byte_ids("defg")])
    assert (result.text, result.finish_reason) == ("abcd", "length")
    assert scanner.max_num_tokens == 10
    assert make_scanner(prompt=byte_ids("prompt"), max_model_len=10, max_tokens=2).max_num_tokens == 8


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abX")])
def test_a_stop_token_counts_and_is_text_only_if_asked(include, text):
    (stop,) = byte_ids("X")
    scanner = make_scanner(stop_token_ids=[stop], include_stop_str_in_output=include)
    result = scan_all(scanner, [byte_ids("abXcd")])
    assert (result.token_ids, result.text) == (byte_ids("abX"), text)
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_eos_is_text_only_if_asked_twice():
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    for params, text in ({}, "a"), ({"skip_special_tokens": False}, "a"), (shown, "a</s>"):
        assert scan_all(make_scanner(**params), [[*byte_ids("a"), EOS]]).text == text


def test_stops_before_min_tokens_do_not_stop():
    """B05: six tokens, then the stop; a run that holds both is cut between them."""
    (own,) = byte_ids("X")
    for stop in (EOS, own):
        scanner = make_scanner(min_tokens=6, stop_token_ids=[own])
        result = scan_all(scanner, [[stop] * 4, [stop] * 4])
        assert (len(result.token_ids), result.finish_reason) == (7, "stop")


def test_ids_alone_need_no_tokenizer():
    result = scan_all(make_scanner(tokenizer=None, max_tokens=5), [[7, 8], [9, EOS, 3]])
    assert (result.token_ids, result.text, result.finish_reason) == ([7, 8, 9, EOS], "", "stop")
    with pytest.raises(ValueError, match=r"stop is \['x'\]"):
        make_scanner(tokenizer=None, stop=["x"])


@pytest.mark.parametrize("sizes", [[1], [2], [3], [5], [40], [1, 4], [4, 1, 2]])
def test_a_stop_string_cuts_text_and_ids_at_one_token(sizes):
    """B03, B07: wherever the steps fall, also between the tokens of the stop."""
    runs = pieces_of(byte_ids("x STOP y z"), sizes)
    result = scan_all(make_scanner(stop=["STOP"], max_tokens=9), runs)
    assert (result.text, result.token_ids) == ("x ", byte_ids("x STOP"))
    assert (result.finish_reason, result.stop_reason) == ("stop", "STOP")
    included = scan_all(make_scanner(stop=["STOP"], include_stop_str_in_output=True), runs)
    assert (included.text, included.token_ids) == ("x STOP", byte_ids("x STOP"))


def test_a_stop_string_completed_within_a_token_drops_the_rest_of_its_text():
    token_ids = BYTE_LEVEL.encode("hello world")
    assert any("llo" in BYTE_LEVEL.decode([i]) for i in token_ids)
    result = scan_all(make_scanner(stop=["ll"]), [token_ids])
    assert result.text == "he"
    assert "ll" not in BYTE_LEVEL.decode(result.token_ids[:-1])


def test_the_first_to_fire_wins_over_what_follows_in_the_run():
    run = [*byte_ids("ab"), *byte_ids("END"), EOS]
    assert scan_all(make_scanner(stop=["END"]), [run]).stop_reason == "END"
    early_eos = scan_all(make_scanner(stop=["END"]), [[*byte_ids("aEN"), EOS, *byte_ids("D")]])
    assert (early_eos.text, early_eos.finish_reason, early_eos.stop_reason) == ("aEN", "stop", None)
    in_time = scan_all(make_scanner(stop=["END"], max_tokens=5), [run])
    assert (in_time.finish_reason, len(in_time.token_ids)) == ("stop", 5)
    too_late = scan_all(make_scanner(stop=["END"], max_tokens=4), [run])
    assert (too_late.text, too_late.finish_reason) == ("abEN", "length")


@pytest.mark.parametrize("sizes", [[1], [3], [4], [20]])
def test_a_stop_string_before_min_tokens_is_text(sizes):
    """B05: the string must end with token `min_tokens` or later; one that began earlier counts."""
    for min_tokens, text in ((0, "a"), (3, "a"), (4, "aXYb"), (7, "aXYb"), (8, "aXYbXYc")):
        scanner = make_scanner(stop=["XY"], min_tokens=min_tokens)
        runs = pieces_of([*byte_ids("aXYbXYc"), EOS], sizes)
        result = scan_all(scanner, runs)
        assert result.text == (text if min_tokens < 7 else "aXYbXYc"), min_tokens
        assert (result.stop_reason == "XY") == (min_tokens < 7)


def test_a_stop_string_that_came_too_early_does_not_stop_later():
    scanner = make_scanner(stop=["X", "XYZ"], min_tokens=2)
    assert scan_all(scanner, [byte_ids("X"), byte_ids("abX")]).text == "Xab"


def test_a_stop_string_that_the_end_completes_stops():
    result = scan_all(make_scanner(stop=["\ufffd"], max_tokens=3), [byte_ids("aé")[:2], byte_ids("b")])
    assert (result.text, result.stop_reason) == ("a", "\ufffd")
    at_the_end = scan_all(make_scanner(stop=["\ufffd"], max_tokens=2), [byte_ids("aé")])
    assert (at_the_end.text, at_the_end.finish_reason, len(at_the_end.token_ids)) == ("a", "stop", 2)


def test_nothing_of_a_stop_string_leaves_before_it_is_decided():
    scanner = make_scanner(stop=["STOP", "TOPAZ"])
    texts = [scanner.scan([token_id]).text for token_id in byte_ids("a STOXSTO")]
    assert texts == ["a", " ", "", "", "", "STOX", "", "", ""]
    assert scanner.flush() == "STO"


def first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """Text before the stop that ends first, the longest of those, and the stop: by the definition."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return None


@REPRODUCIBLE
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_stop_strings_are_found_and_held_back_however_text_falls_into_pieces(text, stops, sizes):
    matcher, released, taken = StopStrings(stops), "", ""
    expected = first_stop(text, stops)
    for piece in ("".join(letters) for letters in pieces_of(list(text), sizes)):
        found = matcher.find(piece)
        if found is not None:
            assert (released + found.text_before, found.stop) == expected
            assert (taken + piece)[: len(taken) + found.end].endswith(found.stop)
            return
        taken += piece
        released += matcher.push(piece)
        held = next(taken[i:] for i in range(len(taken) + 1) if any(s.startswith(taken[i:]) for s in stops))
        assert released == taken[: len(taken) - len(held)], "held back too much or too little"
    assert expected is None
    assert released + matcher.flush() == text


@REPRODUCIBLE
@given(
    letters=st.lists(st.sampled_from([*byte_ids("abé"), EOS, *BYTE_LEVEL.encode("你")]), max_size=24),
    stops=st.lists(st.text("abé你", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 20),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_what_is_reported_does_not_depend_on_the_runs(letters, stops, min_tokens, max_tokens, sizes, include):
    def scan(sizes: list[int]) -> ScannedRun:
        scanner = make_scanner(
            stop=stops, min_tokens=min_tokens, max_tokens=max_tokens, include_stop_str_in_output=include
        )
        result = scan_all(scanner, pieces_of(letters, sizes))
        return result if result.finish_reason else ScannedRun(result.token_ids, None, result.text + scanner.flush())

    one_by_one = scan([1])
    assert scan(sizes) == one_by_one
    assert len(one_by_one.token_ids) <= max_tokens
    if not stops and EOS not in one_by_one.token_ids:
        assert one_by_one.text == BYTE_LEVEL.decode(one_by_one.token_ids, skip_special_tokens=True)
