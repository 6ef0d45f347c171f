"""`make demo-yarn`: why a model must be told about longer rows, on a real model and a real book.

SmolLM2-135M was made for 8,192 tokens. It reads 16,384 tokens of the King James Bible twice, as it is and with YaRN × 4,
untrained; `megaspan eval` gives the loss by position. The mean over the row would hide what the curve shows.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from texts import king_james_bible, smollm2_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaspan.evaluate import evaluate_command
from megaspan.report import plot_positions

BUILD = Path("build/demo-yarn")
TOKENS = 16_384
WINDOW = 8_192
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW}}


def main() -> None:
    """Measures both, prints one table and draws one picture."""
    model = smollm2()
    text = BUILD / "text.txt"
    text.write_text(king_james_bible().read_text()[400_000:])
    common = ["--dataset_name", str(text), "--max_length", str(TOKENS), "--max_rows", "1"]
    runs = {
        "as it is": [*common, "--allow_past_window", "true"],
        "with YaRN × 4": [*common, "--model_init_kwargs", json.dumps(YARN)],
    }
    results = {}
    for name, flags in runs.items():
        print(f"SmolLM2-135M {name}: reading {TOKENS:,} tokens (a minute or two on two cores)", file=sys.stderr)
        results[name] = evaluate_command(str(model), flags)
    (BUILD / "positions.json").write_text(json.dumps(results, indent=1))

    print(f"{'position':>15}" + "".join(f"{name:>16}" for name in results) + "    perplexity")
    for spans in zip(*(result["positions"] for result in results.values()), strict=True):
        print(f"{spans[0]['start']:>7,}–{spans[0]['stop']:>7,}" + "".join(f"{span['perplexity']:>16.1f}" for span in spans))
    curves = {name: [(span["start"], span["loss"]) for span in result["positions"]] for name, result in results.items()}
    print(f"picture: {plot_positions(curves, BUILD / 'positions.png', native_window=WINDOW)}")


def smollm2() -> Path:
    """SmolLM2-135M as an ordinary model folder; made once from the GGUF file, which transformers cannot save as it is."""
    folder = BUILD / "smollm2-135m"
    if not (folder / "model.safetensors").exists():
        gguf = smollm2_gguf()
        print("unpacking SmolLM2-135M (half a minute, once)", file=sys.stderr)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = copy.deepcopy(quantised.config)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict())
        model.tie_weights()
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
