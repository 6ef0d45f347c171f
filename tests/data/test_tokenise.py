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
from tests.data.tokenizers_here import EOS, PAGE, build, fast


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
def test_no_special_token_but_the_end_of_text(workers: int | None) -> None:
    """A tokenizer that starts every text with a token of its own does not do it here; nor does it truncate or pad."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=type(build("gpt2")).from_str(build("gpt2").to_str()), eos_token=EOS)
    plain = tokenizer.backend_tokenizer.encode("some text").ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=100, pad_id=0, pad_token=EOS)
    tokeniser = Tokeniser(tokenizer, 0, workers)
    assert pieces(tokeniser, "some text", PAGE * 2000)[0].ids.tolist() == [*plain, 0]
    assert tokeniser.notes == [
        f"this tokenizer would begin every text with {EOS}, which is not added here",
        "long documents are tokenised in parallel pieces",
    ]


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
    assert tokenizer_hash(fast("llama3")) != before
    assert tokenizer_hash(None) == "none"
