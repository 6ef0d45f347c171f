"""A model of two layers and four small books: `python toy_model.py build/toy` makes the example run on any machine."""

from __future__ import annotations

import pathlib
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def main(folder: pathlib.Path) -> None:
    """Writes `folder`/model and `folder`/books (four modules of Python's own library)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(["<|endoftext|>", *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder / "model")
    config = Qwen3Config(
        vocab_size=len(alphabet) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)  # the same model each time, so that losses can be compared
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    books = folder / "books"
    books.mkdir(parents=True, exist_ok=True)
    for name in ("bisect", "colorsys", "heapq", "textwrap"):
        (books / f"{name}.txt").write_text(pathlib.Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
