"""Loss by position: what the mean hides.

A model read past its window is fine at the start of a row and lost at its end: SmolLM2-135M, made for 8,192 tokens, has a
perplexity of 8 up to there and of 335 at 16,000, and the mean over the row shows neither. So the loss is reported by
position, next to the text's unigram entropy: the loss of a model that knows how often each token occurs and nothing else. No
working model exceeds it, so where the curve crosses that line the positions are wrong (case R52).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megaspan.config import SFTConfig, load_config
from megaspan.config.parallel import OPTIONS
from megaspan.data import Row, Rows, prepare_rows
from megaspan.human import UserError, format_tokens
from megaspan.layers.head import head_of
from megaspan.layers.loss import linear_cross_entropy
from megaspan.model import check_token_ids, load_model, load_tokenizer, plan_of, prepare
from megaspan.model.taken import check_files
from megaspan.plan.facts import read_config
from megaspan.plan.logits import loss_tile
from megaspan.rope import resolve_rope
from megaspan.world import device, keep_kernels, set_allocator

BUCKETS = 16


@dataclass(frozen=True)
class Bucket:
    """Loss over the positions `start` ≤ position < `stop` of the rows.

    Attributes:
        loss: mean negative log-likelihood of the trained tokens there, nats; nan where there is none.
        tokens: trained tokens there.
    """

    start: int
    stop: int
    loss: float
    tokens: int


@torch.no_grad()
def loss_by_position(model: Any, rows: list[Row], bounds: list[int]) -> list[Bucket]:
    """Mean loss between consecutive `bounds`, over all `rows`; a token counts where it stands, not where it is predicted from.

    In a row of packed documents, which see nothing of each other, that is its place in its document.

    Args:
        model: a prepared causal language model on its device.
        rows: rows of any length.
        bounds: increasing positions; the first is 0.
    """
    head, where = head_of(model), next(model.parameters()).device
    sums, counts = np.zeros(len(bounds) - 1), np.zeros(len(bounds) - 1, dtype=np.int64)
    training = model.training
    model.eval()
    for row in (part for whole in rows for part in _stretches(whole)):
        ids = torch.from_numpy(row.input_ids)[None].to(where)
        positions = torch.arange(ids.shape[1], device=where)[None]
        hidden_tE = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        labels_t = torch.from_numpy(row.labels).to(where)
        for place, (start, stop) in enumerate(pairwise(bounds)):
            first, last = max(start, 1), min(stop, len(labels_t))  # a row's first token has nothing to be predicted from
            if first >= last:
                continue
            tile_tokens = loss_tile(head.weight_VE.shape[0])
            part = linear_cross_entropy(hidden_tE[first - 1 : last - 1], head, labels_t[first:last], tile_tokens=tile_tokens)
            sums[place] += part.loss.item()
            counts[place] += int(part.tokens)
    model.train(training)
    return [
        Bucket(start, stop, float(total / count) if count else math.nan, int(count))
        for (start, stop), total, count in zip(pairwise(bounds), sums, counts, strict=True)
    ]


def _stretches(row: Row) -> Iterator[Row]:
    """The documents of a packed row, which see nothing of each other, as rows of their own; any other row as it is."""
    if len(row.attention_lengths) == 1:
        yield row
        return
    ends = list(accumulate(row.attention_lengths))
    for length, end in zip(row.attention_lengths, ends, strict=True):
        yield Row(row.input_ids[end - length : end], row.labels[end - length : end], (length,))


def position_bounds(longest: int, buckets: int = BUCKETS) -> list[int]:
    """Bounds of `buckets` equal spans of a row of `longest` tokens, whole tokens each (fewer spans for very short rows)."""
    buckets = max(1, min(buckets, longest))
    return [round(place * longest / buckets) for place in range(buckets + 1)]


def evaluate_command(what: str, flags: list[str]) -> dict[str, Any]:
    """The verb `megaspan eval`: loss by position of a model on the rows of its configuration.

    Args:
        what: a configuration file, a run folder (its final model, on its own data), or a model folder (data from `flags`).
        flags: options as on the command line; they override the file's.

    Returns:
        `positions` (start, stop, loss, perplexity, tokens), `loss`, `perplexity`, `unigram_entropy`, `rows`, `tokens`, `model`.

    Raises:
        UserError: `what` is none of the three.
    """
    set_allocator()
    if torch.cuda.is_available():
        keep_kernels()
    config = _on_one_device(_config_of(what, flags))
    if config.dataset_name is None and config.datasets is None:
        raise UserError(
            f"{what} names no data: its text was given in Python, or none is",
            allowed="a file, a folder, a glob or a hub name",
            do=f"Type megaspan eval {what} --dataset_name …",
        )
    typed = any(flag.replace("-", "_").partition("=")[0] == "__dataset_name" for flag in flags)
    loaded, rows = _load(config, typed)
    model = prepare(loaded.model, config, plan_of(loaded.model, config))  # `config` may be of a run, with its optimizer
    chosen = [rows[number] for number in range(len(rows))]
    buckets = loss_by_position(model, chosen, position_bounds(max(max(row.attention_lengths) for row in chosen)))
    tokens = sum(bucket.tokens for bucket in buckets)
    loss = sum(bucket.loss * bucket.tokens for bucket in buckets if bucket.tokens) / tokens
    unigram = sum(rows.unigram_entropy(number) * len(row.input_ids) for number, row in enumerate(chosen))
    return {
        "model": config.model_name_or_path,
        "rows": len(chosen),
        "tokens": tokens,
        "loss": loss,
        "perplexity": math.exp(loss),
        "unigram_entropy": unigram / sum(len(row.input_ids) for row in chosen),
        "positions": [
            {
                "start": bucket.start,
                "stop": bucket.stop,
                "loss": bucket.loss,
                "perplexity": math.exp(bucket.loss),
                "tokens": bucket.tokens,
            }
            for bucket in buckets
        ],
    }


def render(result: dict[str, Any]) -> str:
    """The result of `evaluate_command` as a table."""
    lines = [
        f"{result['model']}: loss {result['loss']:.4f} over {format_tokens(result['tokens'])} tokens of {result['rows']} rows"
    ]
    lines.append(f"{'position':>19}  {'loss':>7}  {'perplexity':>10}")
    for span in result["positions"]:
        above = "  above the unigram entropy" if span["loss"] > result["unigram_entropy"] else ""
        place = f"{format_tokens(span['start']):>9}–{format_tokens(span['stop']):>9}"
        lines.append(f"{place}  {span['loss']:7.3f}  {span['perplexity']:10.1f}{above}")
    lines.append(f"unigram entropy of the text: {result['unigram_entropy']:.3f} nats")
    return "\n".join(lines)


def _on_one_device(config: SFTConfig) -> SFTConfig:
    """The same without the sizes that a run is split by: they change nothing about the loss."""
    split = {option: getattr(config, option) for option in OPTIONS if (getattr(config, option) or 1) > 1}
    if not split:
        return config
    told = " × ".join(f"{option} {size}" for option, size in split.items())
    print(f"evaluation runs on one device; {told} is how training is split", file=sys.stderr)
    return config.replace(**{option: None if option == "dp_shard_size" else 1 for option in split})


def _load(config: SFTConfig, typed: bool) -> tuple[Any, Rows]:
    """Model and rows; `typed` data is what is to be read, whether or not it has a split of the held-out one's name."""
    named = config.dataset_name if typed and config.dataset_config is None else None
    source = {**read_config(str(config.model_name_or_path), config.model_revision), **config.config_overrides}
    resolve_rope(source, config.rope_parameters, config.max_length, config.allow_past_window)  # before a row is made
    check_files(config)
    rows = prepare_rows(config, load_tokenizer(config), split=_split(config), dataset=named)
    loaded = load_model(config, device(config.use_cpu))
    check_token_ids(rows.max_id, loaded.facts.vocab)
    return loaded, rows


def _split(config: SFTConfig) -> str:
    """Held-out data where the configuration names some, else the data it trains on."""
    return "test" if config.eval_strategy != "no" else "train"


def _refuse_adapter(folder: Path, named: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{named} holds an adapter, which is evaluated inside its base model",
            do=f"Merge it: megaspan export {named} OUT --merge; then megaspan eval OUT --dataset_name … --max_length …",
        )


def _config_of(what: str, flags: list[str]) -> SFTConfig:
    path = Path(what)
    if path.is_file() and path.suffix in {".yaml", ".yml"}:
        return load_config(path, flags)
    if (path / "config.yaml").is_file():
        model = path / "model"
        if not model.is_dir():
            raise UserError(
                f"{path} holds no finished model",
                do=f"Export a checkpoint: megaspan export {path} OUT; then megaspan eval OUT --dataset_name … --max_length …",
            )
        _refuse_adapter(model, path)
        return load_config(
            path / "config.yaml", [*_without_rope(path / "config.yaml"), "--model_name_or_path", str(model), *flags]
        )
    _refuse_adapter(path, path)
    if (path / "config.json").is_file():
        return load_config(None, ["--model_name_or_path", str(path), *flags])
    kind = (
        "holds neither config.yaml nor config.json" if path.is_dir() else "is no .yaml" if path.exists() else "does not exist"
    )
    raise UserError(
        f"nothing to evaluate: {what} {kind}",
        allowed="a configuration (.yaml), a run folder or a model folder",
        do="Type megaspan eval RUN, or megaspan eval MODEL --dataset_name … --max_length …",
    )


def _without_rope(config: Path) -> list[str]:
    """A run's saved model carries its rope settings itself; asking for them again could only contradict it."""
    wishes = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("model_init_kwargs") or {}
    kept = {name: value for name, value in wishes.items() if name not in {"rope_parameters", "revision"}}
    return ["--model_init_kwargs", yaml.safe_dump(kept or None, default_flow_style=True).strip().removesuffix("\n...")]
