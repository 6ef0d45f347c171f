"""Loss by position."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megaspan import evaluate
from megaspan.config import SFTConfig
from megaspan.data import Row
from megaspan.evaluate import _on_one_device, evaluate_command, loss_by_position, position_bounds, render
from megaspan.human import UserError
from megaspan.model import prepare
from tests.models import save_model_folder, tiny


def row_of(length: int, masked: tuple[int, ...] = (0,), seed: int = 0) -> Row:
    ids = np.random.default_rng(seed).integers(0, 128, length)
    labels = ids.copy()
    labels[list(masked)] = -100
    return Row(ids, labels, (length,))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_each_bucket_is_the_mean_over_its_own_tokens(family):
    model = tiny(family)
    rows = [row_of(37, (0, 5, 6)), row_of(20, (0,), seed=1)]
    sums, counts = np.zeros(40), np.zeros(40)
    with torch.no_grad():
        for row in rows:
            log_p = model.eval()(torch.from_numpy(row.input_ids)[None]).logits[0].float().log_softmax(-1)
            for place in range(1, len(row.input_ids)):
                if row.labels[place] != -100:
                    sums[place] -= log_p[place - 1, row.labels[place]].item()
                    counts[place] += 1
    prepare(model.train(), SFTConfig(max_length=64, allow_past_window=True))
    bounds = [0, 5, 7, 30, 37, 40]
    buckets = loss_by_position(model, rows, bounds)
    for bucket in buckets:
        span = slice(bucket.start, bucket.stop)
        assert bucket.tokens == counts[span].sum()
        if bucket.tokens:
            assert bucket.loss == pytest.approx(sums[span].sum() / counts[span].sum(), rel=2e-5)
        else:
            assert np.isnan(bucket.loss)
    assert buckets[1].tokens == 2  # positions 5 and 6 of the first row are masked; only 5 and 6 of the second count
    assert model.training


@pytest.mark.parametrize("padding", [0, 3])
def test_packed_documents_are_evaluated_each_for_itself(padding):
    """A token of a packed row counts at its place in its document, and no document sees another."""
    model = prepare(tiny("llama"), SFTConfig(max_length=64, allow_past_window=True))
    lengths, bounds = (13, 1, 20), [0, 4, 12, 20]
    rows = [row_of(length, seed=length) for length in lengths]
    pad = np.zeros(padding, np.int64)
    ids = np.concatenate([*(row.input_ids for row in rows), pad])
    labels = np.concatenate([*(row.labels for row in rows), pad - 100])
    packed = Row(ids, labels, lengths, padding, lengths)
    for got, want in zip(loss_by_position(model, [packed], bounds), loss_by_position(model, rows, bounds), strict=True):
        assert (got.start, got.stop, got.tokens) == (want.start, want.stop, want.tokens)
        assert got.loss == pytest.approx(want.loss, rel=1e-5)


def test_bounds_cover_the_row_in_whole_tokens():
    assert position_bounds(16_384)[:3] == [0, 1024, 2048]
    assert position_bounds(5) == [0, 1, 2, 3, 4, 5]
    assert position_bounds(1_000_003)[-1] == 1_000_003


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    save_model_folder(folder / "model")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    return folder


def test_a_model_folder_is_evaluated_on_the_data_of_the_flags(workplace):
    flags = ["--dataset_name", str(workplace / "text.txt"), "--max_length", "500"]
    result = evaluate_command(str(workplace / "model"), flags)
    assert result["rows"] == 4
    model = AutoModelForCausalLM.from_pretrained(workplace / "model", dtype=torch.float32).eval()
    assert result["loss"] > result["unigram_entropy"]  # random weights know less than word counts
    assert sum(span["tokens"] for span in result["positions"]) == result["tokens"]
    text = render(result)
    assert "above the unigram entropy" in text
    assert "perplexity" in text
    assert model.config.vocab_size == 320


def test_the_verb_and_its_mistakes(workplace):
    flags = ["--dataset_name", str(workplace / "text.txt"), "--max_length", "500"]
    done = subprocess.run(
        [sys.executable, "-m", "megaspan", "eval", str(workplace / "model"), *flags, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 4
    for what, why in (
        (workplace, "holds neither config.yaml nor config.json"),
        (workplace / "text.txt", r"is no \.yaml"),
        (workplace / "none", "does not exist"),
    ):
        with pytest.raises(UserError, match=rf"nothing to evaluate: .*{what.name} {why}; allowed: .* megaspan eval RUN, or"):
            evaluate_command(str(what), [])


@pytest.mark.parametrize(
    "line",
    ["dataset_name: null", "eval_strategy: steps\neval_steps: 1", "datasets: [{path: /nowhere/a.txt}]\neval_strategy: steps"],
)
def test_a_run_made_in_python_is_evaluated_on_data_that_is_named(workplace, tmp_path, line):
    """Its configuration names no text, or its held-out text has no name: what is typed is read, whole."""
    (tmp_path / "config.yaml").write_text(f"max_length: 500\n{line}\n")
    (tmp_path / "model").symlink_to(workplace / "model")
    if "datasets" not in line:
        with pytest.raises(UserError, match=r"names no data: .* Type megaspan eval .* --dataset_name …"):
            evaluate_command(str(tmp_path), [])
    for flags in (["--dataset_name", str(workplace / "text.txt")], [f"--dataset-name={workplace / 'text.txt'}"]):
        assert evaluate_command(str(tmp_path), flags)["rows"] == 4


def test_a_token_that_the_model_lacks_is_a_sentence(workplace):
    """An index error of the embedding on a CPU, an assertion that names nothing on a GPU."""
    (workplace / "ids.jsonl").write_text('{"input_ids": [1, 2, 320]}\n')
    with pytest.raises(UserError, match="a token that the model does not know; got 320"):
        evaluate_command(str(workplace / "model"), ["--dataset_name", str(workplace / "ids.jsonl"), "--max_length", "40"])


def test_an_adapter_is_told_to_be_merged_first(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("max_length: 64\n")
    for place in (tmp_path, tmp_path / "model"):
        with pytest.raises(UserError, match=f"megaspan export {place} OUT --merge"):
            evaluate_command(str(place), [])


def test_the_sizes_of_training_are_said_and_left_out(capsys):
    """A run on eight GPUs is evaluated on one: its loss does not depend on how it was split."""
    config = SFTConfig(max_length=64, cp_size=4, dp_shard_size=2)
    assert _on_one_device(config) == SFTConfig(max_length=64)
    assert capsys.readouterr().err.startswith("evaluation runs on one device; dp_shard_size 2 × cp_size 4 is how training")


def test_rows_past_the_window_are_refused_before_they_are_made(tmp_path, monkeypatch):
    """The text was tokenised first, for minutes."""
    (tmp_path / "model").mkdir()
    save_model_folder(tmp_path / "model")
    monkeypatch.setattr(evaluate, "prepare_rows", lambda *_, **__: pytest.fail("rows are made"))
    with pytest.raises(UserError, match="seen positions up to 4,096 only"):
        evaluate_command(str(tmp_path / "model"), ["--max_length", "8k", "--dataset_name", "text.txt"])
