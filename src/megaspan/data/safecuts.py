"""Where a long document can be cut so that its pieces tokenise to exactly the ids of the whole.

A book or a repository is one document of up to tens of millions of characters. Tokenised in one call it needs some 150 bytes of
bookkeeping per token (1.5 GB at ten million tokens) and uses one core, however many there are. Cut anywhere, the ids at the
cuts change: a word in two pieces, a space lost. So every stage of the tokenizer is read from its own description (added tokens,
normalizer, splitter, model) and a cut is made only between two characters where each stage provably treats the left and the
right part alone as it treats them together. Most cuts fall between a letter and a space, a comma or a line break.

A model without splitter (SentencePiece BPE, as in Llama 2 and Gemma) is cut where no merge rule joins the two characters: pairs
are merged by rank, a pair across the cut is in no rule, so both sides merge independently. Where nothing can be proven the
document is tokenised in one piece, which is slower but right. Each kind of cut that is used is also tried once on the text.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megaspan.data.regexpaths import Pattern, literal, read_pattern, settled

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"\w+|[^\w\s]+"
_TRIAL = 200  # characters on each side of a cut that is tried


@dataclass(frozen=True)
class _Seam:
    """The two characters at a cut, as one stage of the tokenizer hands them to the next."""

    left: str
    right: str
    divided: bool = False  # a splitter has surely put them in different words


class SafeCuts:
    """The proven cuts of one tokenizer.

    Args:
        backend: a `tokenizers.Tokenizer`.

    Attributes:
        reason: why no cut can be proven for this tokenizer, or None.
    """

    def __init__(self, backend: Any) -> None:
        spec = json.loads(backend.to_str())
        self._backend = backend
        self._normalizers = _flat(spec.get("normalizer"), "normalizers")
        self._splitters = _flat(spec.get("pre_tokenizer"), "pretokenizers")
        self._model: dict[str, Any] = spec["model"]
        self._joins: set[str] | None = None
        self._drop_space = any(step["type"] == "Prepend" for step in self._normalizers)
        contents = {token["content"] for token in spec.get("added_tokens") or [] if token["content"]}
        if backend.normalizer is not None:
            contents |= {backend.normalizer.normalize_str(content) for content in contents}
        self._added = sorted(contents - {""})
        self._reach = max((len(content) for content in self._added), default=0) + 2
        self._known: dict[str, bool] = {}
        self._tried: dict[str, bool] = {}
        self.reason = self._unprovable()

    def pieces(self, text: str, size: int) -> Iterator[str]:
        """Consecutive pieces of `text`, of `size` characters up to the next safe cut; their ids joined are the ids of `text`.

        A tokenizer that puts a space before every text gets the pieces after the first one without their leading space.
        """
        start, skip = 0, 0
        while self.reason is None and len(text) - start > size + size // 2:
            cut = self._next_cut(text, start + size)
            if cut is None:
                break
            yield text[start + skip : cut]
            start, skip = cut, int(self._drop_space)
        yield text[start + skip :]

    def safe(self, left: str, right: str) -> bool:
        """Whether every text may be cut between the characters `left` and `right`, added tokens and marks apart."""
        pair = left + right
        if pair not in self._known:
            self._known[pair] = self._prove(left, right)
        return self._known[pair]

    def _next_cut(self, text: str, start: int) -> int | None:
        position = start
        while position < len(text) - 1:
            if self.safe(text[position - 1], text[position]) and settled(text[position + 1]):
                if self._added_token_near(text, position):
                    position += self._reach
                    continue
                if self._try(text, position):
                    return position
            position += 1
        return None

    def _added_token_near(self, text: str, position: int) -> bool:
        """Added tokens are found before anything else and may swallow spaces: none may lie within their reach of a cut."""
        window = text[max(0, position - self._reach) : position + self._reach]
        windows = [window]
        if self._backend.normalizer is not None:
            windows.append(self._backend.normalizer.normalize_str(window))
        return any(content in window for window in windows for content in self._added)

    def _try(self, text: str, position: int) -> bool:
        """The proof tried on the library that runs: once for each pair of characters."""
        pair = text[position - 1 : position + 1]
        if pair not in self._tried:
            left, right = text[max(0, position - _TRIAL) : position], text[position : position + _TRIAL]
            whole = self._ids(left + right)
            self._tried[pair] = whole == self._ids(left) + self._ids(right[int(self._drop_space) :])
            self._known[pair] = self._tried[pair]
        return self._tried[pair]

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _unprovable(self) -> str | None:
        for step in self._normalizers:
            if step["type"] not in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace", "Prepend"):
                return f"its normalizer {step['type']} is not understood"
            if step["type"] == "Replace" and _pattern(step["pattern"]) is None:
                return "its replacing pattern is not understood"
        for stage in self._splitters:
            if stage["type"] not in _SPLITTERS:
                return f"its splitter {stage['type']} is not understood"
            if stage["type"] == "Split" and _pattern(stage["pattern"]) is None:
                return "its splitting pattern is not understood"
        if self._model.get("type", "BPE") not in ("BPE", "WordPiece", "WordLevel", "Unigram") or self._model.get("dropout"):
            return "its model is not understood"
        return None

    def _prove(self, left: str, right: str) -> bool:
        if self.reason is not None or not settled(left) or not settled(right) or left.isspace():
            return False
        seam = self._normalise(_Seam(left, right))
        for stage in self._splitters:
            if seam is None:
                return False
            if seam.divided and stage["type"] not in ("Metaspace",):
                continue  # later stages see two words, in the whole as in the parts
            seam = _SPLITTERS[stage["type"]](stage, seam)
        return seam is not None and (seam.divided or self._never_joined(seam))

    def _normalise(self, seam: _Seam) -> _Seam | None:
        for number, step in enumerate(self._normalizers):
            changed: _Seam | None
            if step["type"] == "Prepend":  # the same as the space that the part gives up, once spaces are replaced
                spaces = {"type": "Replace", "pattern": {"String": " "}, "content": step["prepend"]}
                changed = seam if self._normalizers[number + 1 :][:1] == [spaces] and seam.right == " " else None
            elif step["type"] == "Replace":
                changed = _replace(step, seam)
            elif step["type"] == "Lowercase":
                left, right = seam.left.lower(), seam.right.lower()
                changed = _Seam(left, right) if len(left) == len(right) == 1 else None
            else:
                stable = all(unicodedata.normalize(step["type"], letter) == letter for letter in (seam.left, seam.right))
                changed = seam if stable else None
            if changed is None:
                return None
            seam = changed
        return seam

    def _never_joined(self, seam: _Seam) -> bool:
        """For a BPE that may see both sides in one word: no merge rule joins a symbol ending in left to one that starts with
        right, both are in the vocabulary, and nothing depends on the length of the word.
        """
        model = self._model
        if model.get("type", "BPE") != "BPE" or model.get("ignore_merges"):
            return False
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return False
        if self._joins is None:
            pairs = (rule.split(" ") if isinstance(rule, str) else rule for rule in model["merges"])
            self._joins = {first[-1] + second[0] for first, second in pairs}
        vocabulary = model["vocab"]
        return seam.left in vocabulary and seam.right in vocabulary and seam.left + seam.right not in self._joins


def _flat(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[key] for inner in _flat(part, key)]
    return [step]


def _pattern(pattern: dict[str, str]) -> Pattern | None:
    return read_pattern(pattern["Regex"]) if "Regex" in pattern else read_pattern(literal(pattern["String"]))


def _replace(step: dict[str, Any], seam: _Seam) -> _Seam | None:
    single = step["pattern"].get("String", "")
    if len(single) == 1 and step["content"]:
        left = step["content"][-1] if seam.left == single else seam.left
        return _Seam(left, step["content"][0] if seam.right == single else seam.right)
    pattern = _pattern(step["pattern"])
    return seam if pattern is not None and not pattern.takes(seam.left) and not pattern.takes(seam.right) else None


def _split(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    return _matches(_pattern(stage["pattern"]), stage["behavior"], seam)


def _matches(pattern: Pattern | None, behavior: str, seam: _Seam) -> _Seam | None:
    if pattern is None:
        return None
    if not pattern.takes(seam.left) and not pattern.takes(seam.right):
        return seam  # both lie in one stretch without a match, in the whole as in the parts
    if behavior not in ("Isolated", "Removed") or not pattern.separates(seam.left, seam.right):
        return None
    divided = pattern.always_takes(seam.left) or pattern.always_takes(seam.right)
    return _Seam(seam.left, seam.right, True) if divided else (seam if behavior == "Isolated" else None)


def _byte_level(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    if stage["add_prefix_space"] and seam.right != " ":
        return None
    if stage.get("use_regex", True):
        return _matches(read_pattern(GPT2_PATTERN), "Isolated", seam)
    left, right = _byte_letter(seam.left.encode()[-1]), _byte_letter(seam.right.encode()[0])
    return _Seam(left, right)


def _byte_letter(byte: int) -> str:
    """The printable stand-in of a byte in byte-level vocabularies: itself where printable, else 256 and up in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + sum(other not in printable for other in range(byte)))


def _metaspace(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    mark = stage["replacement"]
    if seam.right not in (" ", mark):
        return None  # a part that does not start with the mark would get one
    return _Seam(mark if seam.left == " " else seam.left, mark, seam.divided or stage.get("split", True))


def _digits(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    digits = [unicodedata.category(letter).startswith("N") for letter in (seam.left, seam.right)]
    divided = any(digits) if stage["individual_digits"] else digits[0] != digits[1]
    return _Seam(seam.left, seam.right, divided)


def _by_letter(belongs: Sequence[bool], behavior: str, seam: _Seam) -> _Seam | None:
    if not any(belongs):
        return seam
    return _Seam(seam.left, seam.right, True) if behavior in ("Isolated", "Removed") else None


def _punctuation(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    return _by_letter([_is_punctuation(letter) for letter in (seam.left, seam.right)], stage["behavior"], seam)


def _is_punctuation(letter: str) -> bool:
    return letter in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~" or unicodedata.category(letter).startswith("P")


def _bert(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    return _by_letter([letter.isspace() or _is_punctuation(letter) for letter in (seam.left, seam.right)], "Isolated", seam)


def _spaces(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    return _by_letter([letter.isspace() for letter in (seam.left, seam.right)], "Removed", seam)


def _words(stage: dict[str, Any], seam: _Seam) -> _Seam | None:
    return _matches(read_pattern(_WORDS), "Removed", seam)


_SPLITTERS = {
    "Split": _split, "ByteLevel": _byte_level, "Metaspace": _metaspace, "Digits": _digits, "Punctuation": _punctuation,
    "BertPreTokenizer": _bert, "WhitespaceSplit": _spaces, "Whitespace": _words,
}  # fmt: skip
