"""Small tokenizers of every common build, trained on a page of text, so that no test needs a download."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|end|>"
PAGE = (
    "It was the best of times, it was the worst of times; it's 1859 and they'll have 24,601 reasons (or more).\n"
    "\n\tdef walk(self, path='/usr/share'):  # a comment\n        return self.tree[path]  or None\r\n"
    "Ärger mit Größen, déjà vu, naïve — «цитата» и ещё слова. 漢字と仮名、そして漢字。 数は123。\n\n\n   the end 🙂🙂!\n"
)
CORPUS = [PAGE, PAGE.lower(), PAGE.upper(), " ".join(f"word{i} {i * 7}" for i in range(200)), "aaaa aaaaaaaa bbbb " * 20]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _byte_bpe(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece_bpe(pre_tokenizer: Any, normalizer: Any, **model: Any) -> Tokenizer:
    """Trained on words that begin with ▁, as SentencePiece does; then with the splitter and normalizer of the model at hand."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(CORPUS[1:], trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=special))
    spec = json.loads(trained.to_str())
    spec["pre_tokenizer"] = spec["normalizer"] = None
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    spec["model"] |= model
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def _unigram(split: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>", EOS], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    trainer = trainers.WordPieceTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>", EOS])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


_SPACES = normalizers.Replace(" ", "▁")
BUILDS = {
    "gpt2": lambda: _byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2-prefix": lambda: _byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: _byte_bpe(_split(LLAMA3)),
    "qwen": lambda: _byte_bpe(_split(LLAMA3.replace("{1,3}", "")), normalizers.NFC()),
    "o200k": lambda: _byte_bpe(_split(O200K)),
    "cl100k": lambda: _byte_bpe(_split(CL100K)),
    "deepseek": lambda: _byte_bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
                pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
                pre_tokenizers.Split(Regex(DEEPSEEK), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "smollm": lambda: _byte_bpe(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "metaspace": lambda: _sentencepiece_bpe(pre_tokenizers.Metaspace(), None),
    "llama2": lambda: _sentencepiece_bpe(None, normalizers.Sequence([normalizers.Prepend("▁"), _SPACES])),
    "llama2-new": lambda: _sentencepiece_bpe(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None),
    "gemma": lambda: _sentencepiece_bpe(pre_tokenizers.Split(" ", "merged_with_previous"), _SPACES),
    "unknown fused": lambda: _sentencepiece_bpe(None, _SPACES, byte_fallback=False),
    "unigram": lambda: _unigram(split=True),
    "wordpiece": _wordpiece,
}
UNPROVEN = {
    "unigram-whole": lambda: _unigram(split=False),
    "strip": lambda: _byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip()),
    "digit groups": lambda: _byte_bpe(_split(r"\d{1,3}(?=(\d{3})*\b)|\s+|\S+")),
    "lookbehind": lambda: _byte_bpe(_split(r"(?<=\s)\S+|\S+|\s+")),
    "ignore merges": lambda: _sentencepiece_bpe(None, _SPACES, ignore_merges=True),
}


@functools.cache
def build(name: str) -> Tokenizer:
    """The `tokenizers.Tokenizer` of this build."""
    return (BUILDS | UNPROVEN)[name]()


@functools.cache
def fast(name: str = "gpt2") -> PreTrainedTokenizerFast:
    """The same behind transformers, with an end-of-text token."""
    return PreTrainedTokenizerFast(tokenizer_object=build(name), eos_token=EOS)


def framing(name: str, template: str) -> PreTrainedTokenizerFast:
    """The same with a beginning-of-text token <s>, which puts around a text what `template` says: `<s> $A` as Llama does."""
    backend = Tokenizer.from_str(build(name).to_str())
    backend.add_special_tokens(["<s>"])
    known = [(token, backend.token_to_id(token)) for token in ("<s>", EOS)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=EOS)
