"""Documents → token ids, in parallel across documents and inside long ones, with bounded memory.

Texts are collected into batches of four million characters (some 300 MB of bookkeeping inside the `tokenizers` library at its
150 bytes a token) and each batch runs on all cores; a long document is cut where its ids provably stay the same
(`safecuts`). What the model's own tokenizer puts in front of a text (its beginning-of-text token: Llama and Gemma have one and
read badly without it, Qwen and SmolLM2 have none) is found by trying it (`frame`) and put in front of every document of text;
the end-of-text token is appended; both once, where the text does not bring them. Documents that come as ids are taken as
they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaspan.data.frame import Frame, find_frame, framed_samples, ids_by_class
from megaspan.data.records import LARGEST_ID, Document
from megaspan.data.safecuts import SafeCuts
from megaspan.human import UserError

PIECE_CHARACTERS = 128 * 1024
_BATCH_CHARACTERS = 4 * 2**20
_FEWEST_CHARACTERS = 64 * 1024
_CHARACTERS_PER_TOKEN = 5  # read ahead for rows that are still needed
_PROBE_CHARACTERS = 2000


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document.

    Attributes:
        document: the document, its text left out.
        number: counts the documents from 0.
        ids: uint32 [T].
        trained: bool [T], or None where all are.
        first: these are the first tokens of the document.
        last: these are the last ones; the end-of-text token is among them.
        in_front: how many of `ids` were put in front here.
        at_end: how many were appended here.
    """

    document: Document
    number: int
    ids: np.ndarray
    trained: np.ndarray | None
    first: bool
    last: bool
    in_front: int = 0
    at_end: int = 0


@dataclass(frozen=True)
class _Job:
    document: Document
    number: int
    text: str | None
    first: bool
    last: bool


class Tokeniser:
    """Turns documents into pieces of ids.

    Args:
        tokenizer: a transformers tokenizer; None where all documents are ids already.
        eos_id: token that ends every document of text; None appends none.
        workers: threads that tokenise; None is one per core.

    Attributes:
        special_ids: ids that carry no text; a document of nothing else is empty. Complete once texts were met.
        notes: what the report should say about this tokenizer; known once texts were met.
    """

    def __init__(self, tokenizer: Any | None, eos_id: int | None, workers: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._eos_id = eos_id
        self._backend = _own_backend(tokenizer)
        self._pool = ThreadPoolExecutor(workers) if workers is not None and workers > 1 else None
        self._workers = workers
        self._cuts: SafeCuts | None = None
        self._frame: Frame | None = None
        self.special_ids = frozenset(getattr(tokenizer, "all_special_ids", ())) | ({eos_id} if eos_id is not None else set())
        self.notes: list[str] = []
        if self._backend is None and tokenizer is not None and workers is not None and workers > 1:
            raise UserError(
                f"dataset_num_proc: {type(tokenizer).__name__} is written in Python and runs on one core",
                got=workers,
                do="Remove dataset_num_proc, or use a fast tokenizer (tokenizer.json)",
            )

    def pieces(self, documents: Iterable[Document], needed: Callable[[], int | None]) -> Iterator[Piece]:
        """The ids of every document, in order. `needed()` is how many more tokens will be used (None: all): no batch reads
        much further than that.
        """
        batch: list[_Job] = []
        characters = 0
        for job in self._jobs(documents):
            batch.append(job)
            ids = job.document.ids
            characters += len(job.text) if job.text is not None else 1 if ids is None else len(ids)
            if characters >= self._limit(needed()):
                yield from self._run(batch)
                batch, characters = [], 0
        yield from self._run(batch)

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _limit(self, needed: int | None) -> int:
        if needed is None:
            return _BATCH_CHARACTERS
        return min(_BATCH_CHARACTERS, max(_FEWEST_CHARACTERS, needed * _CHARACTERS_PER_TOKEN))

    def _jobs(self, documents: Iterable[Document]) -> Iterator[_Job]:
        for number, document in enumerate(documents):
            if document.text is None or not document.text or document.text.isspace():
                yield _Job(document, number, None, True, True)
                continue
            _refuse_halves(document.text, document.place)
            shell = Document(document.place, source=document.source)
            text: str | None = None
            first = True
            for following in self._cut(document.text):
                if text is not None:
                    yield _Job(shell, number, text, first, False)
                    first = False
                text = following
            yield _Job(shell, number, text, first, True)

    def _cut(self, text: str) -> Iterator[str]:
        self._probe(text)
        if self._backend is None or len(text) <= PIECE_CHARACTERS * 3 // 2:
            yield text
            return
        if self._cuts is None:
            self._cuts = SafeCuts(self._backend)
            why = self._cuts.reason
            self.notes.append(f"long documents are tokenised in {f'one piece: {why}' if why else 'parallel pieces'}")
        yield from self._cuts.pieces(text, PIECE_CHARACTERS)

    def _probe(self, text: str) -> None:
        """Finds the frame of documents. A tokenizer class may do more than its backend does; then only the class is trusted."""
        if self._frame is not None:
            return
        if self._tokenizer is None:
            do = "Copy tokenizer.json and tokenizer_config.json of its base model into its folder (a shape has none: name a "
            do += "model in its place), or give input_ids"
            raise UserError("text needs a tokenizer, and the model has none", do=do)
        self._frame = find_frame(self._tokenizer, self._eos_id)
        self.special_ids |= {*self._frame.front, *self._frame.end}
        if self._frame.front:
            begins = self._tokenizer.decode(list(self._frame.front))
            self.notes.append(f"every document of text begins with {begins}, as this tokenizer does it")
        if self._backend is None:
            return
        sample = text[:_PROBE_CHARACTERS]
        if self._backend.encode(sample, add_special_tokens=False).ids != ids_by_class(self._tokenizer, sample):
            self._backend = None
            self.notes.append(f"{type(self._tokenizer).__name__} changes what its backend does: one document at a time")

    def _run(self, batch: list[_Job]) -> Iterator[Piece]:
        texts = [job.text for job in batch if job.text is not None]
        encoded = iter(self._encode(texts))
        for job in batch:
            if job.text is None:
                document = job.document
                ids = document.ids if document.ids is not None else np.empty(0, np.uint32)
                yield Piece(document, job.number, ids, document.trained, True, True)
                continue
            assert self._frame is not None
            ids = next(encoded)
            in_front = at_end = 0
            if job.last:
                ids, at_end = self._frame.finish(ids)
            if job.first:
                ids, in_front = self._frame.begin(ids)
            yield Piece(job.document, job.number, ids, None, job.first, job.last, in_front, at_end)

    def _encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        if not texts:
            return iter(())
        backend = self._backend
        if backend is None:
            return (_as_ids(ids_by_class(self._tokenizer, text)) for text in texts)

        def one(text: str) -> np.ndarray:
            return _as_ids(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

        if self._workers is None:
            return (_as_ids(encoding.ids) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False))
        return self._pool.map(one, texts) if self._pool is not None else map(one, texts)


def tokenizer_hash(tokenizer: Any | None) -> str:
    """SHA-256 of everything that decides which ids a text gets, those around it included."""
    if tokenizer is None:
        return "none"
    import tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        facts = json.loads(backend.to_str())
        facts = [facts[key] for key in sorted(facts) if key not in ("truncation", "padding", "post_processor", "decoder")]
    else:
        facts = [sorted(tokenizer.get_vocab().items()), str(getattr(tokenizer, "init_kwargs", ""))]
    name, special = type(tokenizer).__name__, sorted(tokenizer.all_special_ids)
    described = json.dumps([name, tokenizers.__version__, facts, special, framed_samples(tokenizer)])
    return hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()


def _own_backend(tokenizer: Any | None) -> Any | None:
    """The `tokenizers.Tokenizer` inside, without its truncation and padding; a copy where it has any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (backend.truncation is None and backend.padding is None):
        return backend
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _as_ids(ids: list[int]) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64)
    if len(array) and (array.min() < 0 or array.max() > LARGEST_ID):
        raise UserError("the tokenizer gave an id outside 0 … 2³¹ − 1", got=int(array.max()))
    return array.astype(np.uint32)


def _refuse_halves(text: str, place: str) -> None:
    """A text with half of a surrogate pair is no Unicode: JSON can spell one, no tokenizer can read it."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} holds half a character, \\u{ord(text[error.start]):04x}, at character {error.start + 1:,}",
            do="Write the whole text as UTF-8: the two halves of such a character only mean something together",
        ) from error
