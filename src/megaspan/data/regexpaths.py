"""Which two neighbouring characters one match of a regular expression can never hold together.

A tokenizer's splitter is a regular expression that runs over the whole text. A book of ten million characters can be tokenised
in pieces, in parallel and in bounded memory, only where a cut provably changes no match. The proof needs no knowledge of the
tokenizer: a pattern is read into its atoms (one per consumed character) and the relation "this atom can follow that one"
(Glushkov's construction, 1961). For a cut between the characters `a|c`:

* no atom that takes `a` is followed by one that takes `c`, so no match crosses the cut;
* no lookahead stands behind an atom that takes `a`, so no choice left of the cut sees what is right of it;
* there are no lookbehinds, anchors or back references (such patterns are not read at all), so a match that starts at the cut
  sees only what is right of it.

Then the matches of the whole are those of the left part followed by those of the right part. Anything outside the subset that
is understood here makes `read_pattern` return None: not proven, so not cut.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")
_SIMPLE_ESCAPES = "sSdDwWrntfv"


@dataclass(frozen=True)
class Atom:
    """One consumed character (`look` False) or a lookahead of one character (`look` True)."""

    source: str
    ignore_case: bool
    look: bool = False


@dataclass
class _Part:
    """A sub-expression: can it be empty, and which atoms can start and end it."""

    empty: bool
    first: set[int]
    last: set[int]


@dataclass(frozen=True)
class Pattern:
    """A splitter's regular expression as paths over its atoms.

    Attributes:
        atoms: every atom, in the order of the pattern.
        follow: for every atom, the atoms that can come directly after it within one match.
        alone: atoms that are a whole match by themselves, in an alternative without lookahead or possessive parts.
    """

    atoms: tuple[Atom, ...]
    follow: tuple[frozenset[int], ...]
    alone: frozenset[int]

    def separates(self, left: str, right: str) -> bool:
        """True when no match can hold `left` directly before `right`, nor choose by looking past `left`."""
        for index, atom in enumerate(self.atoms):
            if atom.look or not _takes(atom, left):
                continue
            for other in self.follow[index]:
                if self.atoms[other].look or _takes(self.atoms[other], right):
                    return False
        return True

    def takes(self, character: str) -> bool:
        """True when some atom can match `character`."""
        return any(not atom.look and _takes(atom, character) for atom in self.atoms)

    def always_takes(self, character: str) -> bool:
        """True when a match surely covers `character`, whatever stands around it."""
        return any(_takes(self.atoms[index], character) for index in self.alone)


@lru_cache(maxsize=256)
def read_pattern(pattern: str) -> Pattern | None:
    """Reads a regular expression of a tokenizer; None when it is outside the subset that can be proven."""
    try:
        reader = _Reader(pattern)
        whole, alone = reader.read()
    except _Unknown:
        return None
    if whole.empty:
        return None  # an empty match could stand anywhere, at a cut too
    follow = tuple(frozenset(targets) for targets in reader.follow)
    return Pattern(tuple(reader.atoms), follow, frozenset(alone))


def literal(text: str) -> str:
    """The pattern that matches exactly `text`."""
    return re.escape(text)


class _Unknown(Exception):
    """The pattern holds something that the proof does not cover."""


class _Reader:
    """Recursive descent over one pattern: alternatives, sequences, quantified atoms."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.ignore_case = False
        self.atoms: list[Atom] = []
        self.follow: list[set[int]] = []
        self.plain = True  # the alternative being read has neither lookahead nor possessive quantifier so far

    def read(self) -> tuple[_Part, set[int]]:
        """The whole pattern, and the atoms that make a match alone."""
        parts, alone = [], set()
        while True:
            self.plain = True
            part = self._sequence()
            if self.plain:
                alone |= {index for index in part.first & part.last}
            parts.append(part)
            if not self._accept("|"):
                break
        if self.at != len(self.text):
            raise _Unknown
        return _either(parts), alone

    def _accept(self, token: str) -> bool:
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def _alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._accept("|"):
            parts.append(self._sequence())
        return _either(parts)

    def _sequence(self) -> _Part:
        part = _Part(True, set(), set())
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            part = self._join(part, self._quantified())
        return part

    def _join(self, left: _Part, right: _Part) -> _Part:
        for index in left.last:
            self.follow[index] |= right.first
        return _Part(
            left.empty and right.empty,
            left.first | right.first if left.empty else left.first,
            left.last | right.last if right.empty else right.last,
        )

    def _quantified(self) -> _Part:
        part = self._single()
        while match := _QUANTIFIER.match(self.text, self.at):
            self.at = match.end()
            quantifier = match[0]
            counted = quantifier[0] == "{"
            if quantifier in "*+" or counted:  # {m,n} as any number from m: more paths, never fewer
                for index in part.last:
                    self.follow[index] |= part.first
            if quantifier in "*?" or (counted and not re.match(r"\{0*[1-9]", quantifier)):
                part = _Part(True, part.first, part.last)
            if counted:
                self.plain = False
            if self._accept("?"):
                continue  # lazy: the same paths, tried in another order
            if self.text.startswith("+", self.at):
                self.plain = False  # possessive: what it took it never gives back
        return part

    def _single(self) -> _Part:
        if self._accept("("):
            return self._group()
        if self.text[self.at] == "[":
            source = self._class()
            if self.ignore_case and not (source.isascii() and "\\p" not in source.lower()):
                raise _Unknown  # folding may turn a member into two characters
            return self._atom(source)
        if self.text[self.at] == "\\":
            return self._atom(self._escape())
        character = self.text[self.at]
        if character in "^$*+?{":
            raise _Unknown
        self.at += 1
        if self.ignore_case and not character.isascii():
            raise _Unknown  # folding may turn it into two characters
        return self._atom("." if character == "." else re.escape(character))

    def _atom(self, source: str, look: bool = False) -> _Part:
        atom = Atom(source, self.ignore_case, look)
        _takes(atom, "a")  # compiles, or the pattern is not understood
        self.atoms.append(atom)
        self.follow.append(set())
        index = len(self.atoms) - 1
        return _Part(look, {index}, {index})

    def _group(self) -> _Part:
        outer = self.ignore_case
        if self._accept("?!") or self._accept("?="):
            self.plain = False
            atoms = len(self.atoms)
            inside = self._single() if not self.text.startswith("(", self.at) else None
            if inside is None or not self._accept(")") or len(self.atoms) != atoms + 1:
                raise _Unknown  # it may look further than one character
            source = self.atoms.pop().source
            self.follow.pop()
            return self._atom(source, look=True)
        if self._accept("?i:"):
            self.ignore_case = True
        elif self._accept("?>"):
            self.plain = False
        elif not self._accept("?:") and self.text.startswith("?", self.at):
            raise _Unknown
        part = self._alternatives()
        if not self._accept(")"):
            raise _Unknown
        self.ignore_case = outer
        return part

    def _class(self) -> str:
        start = self.at
        self.at += 1
        self._accept("^")
        if self.text.startswith("]", self.at):
            raise _Unknown  # engines differ on what this means
        while self.at < len(self.text) and self.text[self.at] != "]":
            if self.text[self.at] == "[" or self.text.startswith(("&&", "--", "~~", "||"), self.at):
                raise _Unknown  # set operations and named classes: engines differ
            if self.text[self.at] == "\\":
                self._escape()
            else:
                self.at += 1
        if not self._accept("]"):
            raise _Unknown
        return self.text[start : self.at]

    def _escape(self) -> str:
        match = re.compile(r"\\(?:[pP]\{\^?[A-Za-z_]+\}|u[0-9a-fA-F]{4}|.)", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise _Unknown
        self.at = match.end()
        kind = match[0][1]
        if len(match[0]) == 2 and kind.isalnum() and kind not in _SIMPLE_ESCAPES:
            raise _Unknown  # anchors, back references, and escapes that engines read differently
        return match[0]


def _either(parts: list[_Part]) -> _Part:
    return _Part(
        any(part.empty for part in parts),
        set().union(*(part.first for part in parts)),
        set().union(*(part.last for part in parts)),
    )


@lru_cache(maxsize=65536)
def _takes(atom: Atom, character: str) -> bool:
    """Whether `atom` matches `character`, by the `regex` package (transformers depends on it), which knows Unicode classes."""
    import regex

    try:
        return regex.fullmatch(atom.source, character, flags=regex.IGNORECASE if atom.ignore_case else 0) is not None
    except regex.error as error:
        raise _Unknown from error


@lru_cache(maxsize=65536)
def settled(character: str) -> bool:
    """Whether every Unicode engine agrees on what `character` is: a letter, digit, punctuation or symbol that has kept its
    category since Unicode 3.2, a space, a tab or a line break. Marks and conjoining letters, which change with their
    neighbours, are not.
    """
    if character in " \n\r\t":
        return True
    category = unicodedata.category(character)
    if category not in ("Lu", "Ll", "Lo", "Nd", "Po", "Ps", "Pe", "Pd", "Sm", "Sc") and character not in "_`^|~<>=+$":
        return False
    if unicodedata.ucd_3_2_0.category(character) != category or 0x1100 <= ord(character) <= 0x11FF:
        return False
    folded = character.casefold()
    return character.isascii() or (len(folded) == 1 and not folded.isascii())  # ß is "ss" to a pattern that ignores case
