"""Text to ids: order, batches, threads, long documents in linear time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megaspan.data import tokenise
from megaspan.data.records import Document
from megaspan.data.tokenise import Piece, Tokeniser, tokenizer_hash
from megaspan.human import UserError
from tests.data.given import Digits
from tests.data.tokenizers_here import EOS, PAGE, build, fast, framing


def pieces(tokeniser: Tokeniser, *documents: Document | str, needed: int | None = None) -> list[Piece]:
    given = [Document("here", text=document) if isinstance(document, str) else document for document in documents]
    return list(tokeniser.pieces(given, lambda: needed))


def book(characters: int, seed: int = 0) -> str:
    """Prose of different words, so that no cache of the tokenizer answers for it."""
    draw = random.Random(seed)
    stems = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(20_000)]
    words = draw.choices(stems, k=characters // 6)
    return " ".join(word + "." * (number % 13 == 0) for number, word in enumerate(words))[:characters]


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_order_and_ids_do_not_depend_on_threads_or_batches(monkeypatch: pytest.MonkeyPatch, workers: int | None) -> None:
    monkeypatch.setattr(tokenise, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(tokenise, "_BATCH_CHARACTERS", 1000)
    documents = [PAGE * 3, "", book(5000), "short", PAGE, Document("ids", ids=np.array([7, 8], np.uint32)), book(900), None]
    given = [Document("null") if document is None else document for document in documents]
    tokenizer = fast()
    tokeniser = Tokeniser(tokenizer, tokenizer.eos_token_id, workers)
    found = pieces(tokeniser, *given)
    tokeniser.close()
    for number, document in enumerate(documents):
        own = [piece for piece in found if piece.number == number]
        wanted = [] if not document else [7, 8] if isinstance(document, Document) else [*tokenizer(document)["input_ids"], 0]
        assert np.concatenate([piece.ids for piece in own]).tolist() == wanted
        assert [piece.first for piece in own] == [True, *[False] * (len(own) - 1)]
        assert [piece.last for piece in own] == [*[False] * (len(own) - 1), True]
    assert [piece.number for piece in found] == sorted(piece.number for piece in found)
    assert len(found) > 20
    assert tokenizer.eos_token_id == 0


def test_ten_megabytes_in_linear_time_and_the_same_ids() -> None:
    """R80: one document of 10 MB with a run of 1 MB of one letter; once quadratic, 70 s for 500k words."""
    tokenizer = fast()
    tokeniser = Tokeniser(tokenizer, None, 1)
    words = random.Random(0).choices(["it was the", "best of", "they worst", "times", "reasons", "1859,"], k=800_000)
    text = " ".join(words)
    text = text[:5_000_000] + "a" * 1_000_000 + text[5_000_000:9_000_000]
    pieces(tokeniser, text[:200_000])
    seconds = []
    for part in (text[:1_000_000], text):
        started = time.process_time()
        found = pieces(tokeniser, part)
        seconds.append(time.process_time() - started)
    assert len(found) > 50
    assert np.concatenate([piece.ids for piece in found]).tolist() == build("gpt2").encode(text).ids
    assert seconds[1] < 2 * len(text) / 1_000_000 * seconds[0]


def test_the_batch_is_no_larger_than_what_is_needed() -> None:
    read = []

    def documents() -> Iterator[Document]:
        for number in range(1000):
            read.append(number)
            yield Document("here", text=book(20_000, seed=number))

    tokenizer = fast()
    stream = Tokeniser(tokenizer, None).pieces(documents(), lambda: 100)
    next(stream)
    assert len(read) <= 5


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_a_document_begins_as_the_tokenizer_begins_a_text(workers: int | None) -> None:
    """As in TRL, in the first piece of a long document only; nothing is truncated or padded."""
    tokenizer = framing("gpt2", "<s> $A")
    begin = tokenizer.convert_tokens_to_ids("<s>")
    plain = tokenizer.backend_tokenizer.encode("some text", add_special_tokens=False).ids
    assert tokenizer("some text")["input_ids"] == [begin, *plain]
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=100, pad_id=0, pad_token=EOS)
    tokeniser = Tokeniser(tokenizer, 0, workers)
    short, again, *long = pieces(tokeniser, "some text", "<s>some text", PAGE * 2000)
    assert short.ids.tolist() == again.ids.tolist() == [begin, *plain, 0]
    assert (short.in_front, short.at_end, again.in_front, again.at_end) == (1, 1, 0, 1)
    assert len(long) > 2
    assert [piece.in_front for piece in long] == [1, *[0] * (len(long) - 1)]
    assert [piece.at_end for piece in long] == [*[0] * (len(long) - 1), 1]
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    assert np.concatenate([piece.ids for piece in long]).tolist() == [*tokenizer(PAGE * 2000)["input_ids"], 0]
    assert begin in tokeniser.special_ids
    assert tokeniser.notes == [
        "every document of text begins with <s>, as this tokenizer does it",
        "long documents are tokenised in parallel pieces",
    ]


@pytest.mark.parametrize("name", ["llama3", "llama2", "gemma", "qwen"])
@pytest.mark.parametrize("template", ["$A", "<s> $A", f"<s> $A {EOS}", f"$A {EOS}"])
def test_the_ids_are_those_of_the_tokenizer_with_one_end(name: str, template: str) -> None:
    """TRL's ids of a document: special tokens as the tokenizer adds them, and the end of text once."""
    tokenizer = framing(name, template)
    own = tokenizer(PAGE)["input_ids"]
    end = tokenizer.eos_token_id
    (piece,) = pieces(Tokeniser(tokenizer, end), PAGE)
    assert piece.ids.tolist() == [*own, *([end] if own[-1] != end else [])]
    assert piece.at_end == 1


def test_a_frame_that_cannot_be_kept_is_refused_with_the_way_out() -> None:
    tokenizer = framing("gpt2", "$A <s>")
    with pytest.raises(
        UserError, match=r"ends every text with <s>; allowed: the end of text, <\|end\|>\. Set eos_token: '<s>'"
    ):
        pieces(Tokeniser(tokenizer, 0), "text")
    with pytest.raises(UserError, match="allowed: nothing: no end of text is set"):
        pieces(Tokeniser(tokenizer, None), "text")
    begin = tokenizer.convert_tokens_to_ids("<s>")
    assert pieces(Tokeniser(tokenizer, begin), "text")[0].ids.tolist() == tokenizer("text")["input_ids"]
    with pytest.raises(UserError, match=r"Take that out of tokenizer\.json"):
        pieces(Tokeniser(framing("gpt2", f"$A <s> {EOS}"), 0), "text")
    assert len(pieces(Tokeniser(tokenizer, 0), Document("ids", ids=np.array([7], np.uint32)))) == 1

    class Changing(Digits):
        def __call__(self, text: str, *, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
            return super().__call__(text.upper() + "!" if add_special_tokens else text)

    with pytest.raises(UserError, match=r"Changing changes a text .*'a' is \[97\] without and \[65, 33\] with them"):
        pieces(Tokeniser(Changing(), 1), "text")

    class Silent(Digits):
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": []}

    with pytest.raises(UserError, match="Silent gives no token for any of a, A, 0"):
        pieces(Tokeniser(Silent(), 1), "text")


def test_a_class_that_does_more_than_its_backend_is_trusted_instead() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return super().__call__(text.upper(), **options)

    tokenizer = Shouting(tokenizer_object=build("gpt2"), eos_token=EOS)
    tokeniser = Tokeniser(tokenizer, None)
    assert pieces(tokeniser, "some text")[0].ids.tolist() == build("gpt2").encode("SOME TEXT").ids
    assert "changes what its backend does" in tokeniser.notes[0]


def test_python_tokenizers_run_on_one_core() -> None:
    assert pieces(Tokeniser(Digits(), 1), "ab")[0].ids.tolist() == [97, 98, 1]
    with pytest.raises(UserError, match="dataset_num_proc: Digits is written in Python"):
        Tokeniser(Digits(), 1, 2)


def test_what_decides_ids_decides_the_hash() -> None:
    tokenizer = fast()
    before = tokenizer_hash(tokenizer)
    changed = PreTrainedTokenizerFast(tokenizer_object=type(build("gpt2")).from_str(build("gpt2").to_str()), eos_token=EOS)
    assert tokenizer_hash(changed) == before
    changed.backend_tokenizer.enable_truncation(5)
    assert tokenizer_hash(changed) == before
    changed.add_tokens(["<new>"])
    assert tokenizer_hash(changed) != before
    assert tokenizer_hash(framing("gpt2", "<s> $A")) != tokenizer_hash(framing("gpt2", "$A"))
    assert tokenizer_hash(fast("llama3")) != before
    assert tokenizer_hash(None) == "none"
