"""Fine-tune Qwen3-8B on books of a million tokens, every token attending to every earlier one.

    torchrun --nproc-per-node 1 sft_qwen3_8b_1m_context.py
    accelerate launch --config_file one_gpu.yaml sft_qwen3_8b_1m_context.py
    python sft_qwen3_8b_1m_context.py --model build/toy/model --books build/toy/books --max-length 1k --window 32 \\
        --learning-rate 1e-3   # the toy

The YAML file beside this script says the same for `megaspan train`.
"""

from __future__ import annotations

import argparse

from megaspan import SFTConfig, SFTTrainer


def main() -> None:
    """Trains four rows for three epochs and saves the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--books", default="emozilla/pg19", help="hub name, folder, file or glob")
    parser.add_argument("--max-length", default="1M")
    parser.add_argument("--window", type=int, default=32_768, help="positions the model was made for")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--output-dir", default="qwen3-8b-1m")
    options = parser.parse_args()
    args = SFTConfig(
        output_dir=options.output_dir,
        dataset_name=options.books,
        dataset_streaming=options.books == "emozilla/pg19",
        max_length=options.max_length,
        max_rows=4,
        # Past its window the model has never seen a position: YaRN stretches the window 32 times, on the model's own frequency.
        model_init_kwargs={
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": options.window}
        },
        gradient_checkpointing_kwargs={"offload": True},
        learning_rate=options.learning_rate,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = SFTTrainer(model=options.model, args=args)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
