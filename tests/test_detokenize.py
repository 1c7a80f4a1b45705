"""Promises of `agentkv.detokenize`: whole characters, the exact text, and stop strings wherever they are cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from agentkv.detokenize import Detokenizer, Stopped
from agentkv.errors import InvalidInput
from agentkv.models import load_tokenizer, resolve, write_tiny

_settings = settings(max_examples=150, deadline=None, derandomize=True)
_texts = st.text(st.sampled_from("ab \n<|é✓中😀👩‍👧\u0301\ufffd"), max_size=24) | st.text(max_size=16)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(resolve(write_tiny(tmp_path_factory.mktemp("tiny"))))


def _byte_ids(tokenizer, text: str) -> list[int]:
    """One id per UTF-8 byte: the finest cutting there is, inside every character."""
    words = [w for w, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)]
    return [tokenizer.convert_tokens_to_ids(c) for c in "".join(words)]


def _stream(tokenizer, ids, stop=()):
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


@_settings
@given(text=_texts, mixed=st.lists(st.booleans(), min_size=8, max_size=8))
def test_text_comes_out_whole_however_it_is_cut(tokenizer, text, mixed):
    ids = []
    for index, char in enumerate(text):
        cut_fine = mixed[index % len(mixed)]
        ids += _byte_ids(tokenizer, char) if cut_fine else tokenizer.encode(char, add_special_tokens=False)
    pieces, stopped = _stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids, skip_special_tokens=True)
    assert stopped is None
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@_settings
@given(ids=st.lists(st.integers(0, 319), max_size=120))
def test_any_ids_join_to_their_decoding(tokenizer, ids):
    """Most of these are no text at all: stray bytes, special tokens inside characters."""
    pieces, _ = _stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_is_released_by_its_last_byte(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    released = [detokenizer.push(i) for i in _byte_ids(tokenizer, "a😀b")]
    assert released == ["a", "", "", "", "😀", "b"]


def _with_word_starts():
    """A vocabulary of the other great kind: words carry their space, the first one drops it, bytes are tokens."""
    vocab = {w: i for i, w in enumerate(["<unk>", "▁the", "▁", "t", "h", "e", *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@_settings
@given(parts=st.lists(st.sampled_from(["▁the", "▁", "t", "h", "e", "😀", "é"]), max_size=30))
def test_word_starts_and_byte_fallback(parts):
    tokenizer = _with_word_starts()
    ids = []
    for part in parts:
        words = [part] if ord(part[-1]) < 128 or part == "▁" else [f"<0x{b:02X}>" for b in part.encode()]
        ids += tokenizer.convert_tokens_to_ids(words)
    pieces, _ = _stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == "".join(parts).replace("▁", " ").removeprefix(" ")


def test_half_a_character_at_the_end_is_marked(tokenizer):
    ids = _byte_ids(tokenizer, "a😀")[:-1]
    pieces, _ = _stream(tokenizer, ids)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == tokenizer.decode(ids)


@_settings
@given(
    text=st.text(st.sampled_from("the<é"), max_size=24),
    stop=st.lists(st.text(st.sampled_from("the<é"), min_size=1, max_size=4), min_size=1, max_size=3),
    fine=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cutting(tokenizer, text, stop, fine):
    ids = _byte_ids(tokenizer, text) if fine else tokenizer.encode(text, add_special_tokens=False)
    pieces, stopped = _stream(tokenizer, ids, stop)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        assert stopped is None
        assert "".join(pieces) == text
        return
    end, start, string = min(ends)
    assert stopped is not None
    assert stopped.text == string
    assert "".join(pieces) == text[:start]
    before, upto = ids[: stopped.token], ids[: stopped.token + 1]
    assert tokenizer.decode(upto).rstrip("\ufffd").startswith(text[:end])
    assert not tokenizer.decode(before).startswith(text[:end])


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["</tool>"])
    released = [detokenizer.push(i) for i in _byte_ids(tokenizer, "a</too</tool>")]
    assert released == ["a", "", "", "", "", "", "</too", "", "", "", "", "", ""]
    assert detokenizer.stopped == Stopped(12, "</tool>")
    assert detokenizer.finish() == ""


def test_held_text_is_released_at_the_end(tokenizer):
    pieces, stopped = _stream(tokenizer, _byte_ids(tokenizer, "a</too"), ["</tool>"])
    assert stopped is None
    assert pieces == ["a", "", "", "", "", "", "</too"]


def test_special_tokens_have_no_text(tokenizer):
    end = tokenizer.eos_token_id
    pieces, _ = _stream(tokenizer, [end, *_byte_ids(tokenizer, "é")[:1], end, *_byte_ids(tokenizer, "é")[1:], end])
    assert "".join(pieces) == "é"


@pytest.mark.parametrize("stop", ["abc", [""], ["a", ""], [1]])
def test_stop_strings_are_checked(tokenizer, stop):
    with pytest.raises(InvalidInput):
        Detokenizer(tokenizer, stop)


@pytest.mark.parametrize("text", ["a", "no text"])
def test_a_push_costs_the_same_at_any_length(tokenizer, text):
    """Decoding everything at each push would make the last thousand pushes far dearer than the first."""
    ids = _byte_ids(tokenizer, "a") if text == "a" else _byte_ids(tokenizer, "é")[:1]
    detokenizer = Detokenizer(tokenizer)
    times = []
    for _ in range(6):
        start = time.process_time()
        for _ in range(1000):
            detokenizer.push(ids[0])
        times.append(time.process_time() - start)
    assert min(times[3:]) < 4 * min(times[:2]) + 0.01
