"""`make demo`: from nothing to a model fine-tuned on a real book, on the CPU, with every lever on.

A model of two layers, made here with random weights and a window of 2,048 tokens, reads the King James Bible in rows of
16,384 tokens: YaRN stretches its positions eight times, the loss is taken in tiles, layer inputs go through the offload path.
It is the command that trains an 8B model on a GPU; only the model is small.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from texts import king_james_bible
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent
BUILD = Path("build/demo")
VOCABULARY = 2_048


def main() -> int:
    """Makes the tokenizer and the shape, then runs `megaspan train`."""
    book = king_james_bible()
    print(f"the book: {book} ({book.stat().st_size:,} bytes)", file=sys.stderr)
    make_model(BUILD / "model", book.read_text())
    shutil.rmtree(BUILD / "run", ignore_errors=True)  # of an earlier demo: a run is never overwritten unasked
    command = ["train", str(HERE / "demo.yaml"), "--dataset_name", str(book)]
    print(f"megaspan {' '.join(command)}", file=sys.stderr)
    training = subprocess.Popen([sys.executable, "-m", "megaspan", *command])
    while True:
        try:
            return training.wait()
        except KeyboardInterrupt:  # the run has heard Ctrl-C itself: it saves a checkpoint and ends
            continue


def make_model(folder: Path, text: str) -> None:
    """A tokenizer trained on a quarter of the book, and a shape (config.json without weights)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:1_000_000]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
