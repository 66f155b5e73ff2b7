from __future__ import annotations

import random

import pytest
from runtime_toys import ByteTokenizer, PieceTokenizer

from attnbackend.runtime.detokenizer import IncrementalDetokenizer
from attnbackend.runtime.text_stream import TextStream


def pieces_of(tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), prompt or [])
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@pytest.mark.parametrize("text", ["plain", "ünï", "日本語", "👩‍👩‍👧‍👦🎉", "a€b😀" * 30, ""])
def test_joined_pieces_equal_the_whole_text_and_show_no_broken_character(text: str) -> None:
    pieces = pieces_of(list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces_of(list("a€".encode())) == ["a", "", "", "€", ""]


def test_bytes_that_never_become_a_character_come_out_at_the_end() -> None:
    assert pieces_of([*b"ab", 0xE2, 0x82]) == ["a", "b", "", "", "\ufffd"]


def test_bytes_that_are_no_character_come_out_in_the_middle() -> None:
    assert "".join(pieces_of([0xFF, 0xE2, *b"ok"])) == "\ufffd\ufffdok"


def test_a_genuine_replacement_character_is_kept() -> None:
    text = "x\ufffdy\ufffd"
    assert "".join(pieces_of(list(text.encode()))) == text


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    first, *rest = "é".encode()
    assert "".join(pieces_of(rest, prompt=[*b"caf", first])) == "é"


def test_special_tokens_give_no_text() -> None:
    assert "".join(pieces_of([*b"a", 256, *b"b"])) == "ab"


def test_random_bytes_equal_the_whole_text() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tokens = [rng.choice([rng.randrange(256), 0x41, 0xC3, 0xA9]) for _ in range(60)]
        assert "".join(pieces_of(tokens)) == bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("unit", [b"abcd ", "😀".encode(), b"\xff", b"\xe2\x82"], ids=repr)
def test_decoding_costs_linear_time(unit: bytes) -> None:
    def decoded_tokens(length: int) -> int:
        tokenizer = ByteTokenizer()
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        for token in (unit * length)[:length]:
            detokenizer.push(token)
        return tokenizer.num_decoded

    assert decoded_tokens(2000) < 2.2 * decoded_tokens(1000)
    assert decoded_tokens(2000) < 60 * 2000


class StripTokenizer(PieceTokenizer):
    """Loses the space before the first token it decodes, as SentencePiece tokenizers do."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids).removeprefix(" ")


def test_the_space_after_the_prompt_is_kept() -> None:
    detokenizer = IncrementalDetokenizer(StripTokenizer([" is", " Paris", "."]), [0])
    text = "".join(detokenizer.push(token) for token in [1, 2] + [1] * 40)
    assert text == " Paris." + " Paris" * 40


class GroupTokenizer(ByteTokenizer):
    """A run of byte tokens that is not valid as a whole gives one U+FFFD a byte (byte fallback)."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(token_ids)


def test_characters_survive_a_tokenizer_that_takes_them_back_until_the_next_is_complete() -> None:
    text = "é中😀" * 20
    detokenizer = IncrementalDetokenizer(GroupTokenizer(), [])
    assert "".join(detokenizer.push(token) for token in text.encode()) == text


def stream_pieces(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(IncrementalDetokenizer(PieceTokenizer(pieces), []), stops)
    out = []
    for token in range(len(pieces)):
        out.append(stream.push(token))
        if stream.is_stopped:
            break
    out.append(stream.finish())
    assert "".join(out) == stream.text
    return out, stream.is_stopped


def test_a_stop_string_spanning_tokens_is_cut_and_never_shown() -> None:
    assert stream_pieces(["ab", "cE", "N", "Dxy"], ["END"]) == (["ab", "c", "", "", ""], True)


def test_held_text_that_is_no_stop_string_after_all_is_returned() -> None:
    assert stream_pieces(["aE", "N", "T"], ["END"]) == (["a", "", "ENT", ""], False)
    assert stream_pieces(["aE", "N"], ["END"]) == (["a", "", "EN"], False)


def test_an_overlapping_beginning_is_not_lost() -> None:
    assert stream_pieces(["aa", "aab", "c"], ["aab"]) == (["", "aa", ""], True)


def test_the_stop_string_completed_first_wins_and_of_equals_the_longest() -> None:
    assert "".join(stream_pieces(["xabcd"], ["abcd", "bc"])[0]) == "xa"
    assert "".join(stream_pieces(["xabc"], ["bc", "abc"])[0]) == "x"


def test_how_text_is_cut_into_tokens_does_not_change_where_it_stops() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(14))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(2, 6))) for _ in range(2)]
        cuts = sorted(rng.sample(range(15), 4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 14], strict=True)]
        (by_part, part_stops), (by_char, char_stops) = (
            stream_pieces(parts, stops),
            stream_pieces(list(text), stops),
        )
        assert ("".join(by_part), part_stops) == ("".join(by_char), char_stops)
        assert not any(stop in "".join(by_part) for stop in stops)
        assert part_stops == any(stop in text for stop in stops)


def test_a_transformers_tokenizer_is_followed_exactly() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {char: index for index, char in enumerate(sorted(alphabet))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    text = "Zürich, 東京 — 🎉🎉 done.  Two  spaces\nand , commas ' s n't"
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("prompt"))
    assert "".join(detokenizer.push(token) for token in tokenizer.encode(text)) == text
