"""What the user may name, and every refusal with what exists instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from megaspan.data import Rows, sources
from megaspan.human import UserError
from megaspan.store.run import write_run_facts
from tests.data.given import prepare, texts_of

datasets.disable_progress_bars()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`datasets` keeps its own cache below tmp_path and never asks the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def rows_of(folder: Path, name: Any, **options: Any) -> Rows:
    return prepare(folder / "cache", dataset_name=str(name), **{"max_length": 100, "packing": False, **options})


def jsonl(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(str(path))
    return path


def test_one_file_is_one_document(tmp_path: Path) -> None:
    """UTF-8 with or without its mark; line ends are the text's own."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\r\ncd\n")
    assert texts_of(rows_of(tmp_path, tmp_path / "a.txt")) == ["ab\r\ncd\n$"]


def test_a_folder_says_what_it_left_out(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for name, data in {
        "b.py": b"bb", "a.md": b"aa", "Makefile": b"mm", "sub/c.RS": b"cc", "z.png": b"\x89PNG", "y.bin": b"1", "x.bin": b"1",
        "w.bin": b"1", "v.bin": b"1", "latin.txt": b"\xe4\xf6", "zero.txt": b"a\0b", "none.txt": b"", ".git/config": b"no",
        "__pycache__/q.py": b"no", ".hidden.txt": b"no", "data.jsonl": b"{}",
    }.items():  # fmt: skip
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "lost.txt").symlink_to(tmp_path / "nowhere")
    rows = rows_of(tmp_path, source)
    assert "1 file left out: broken link or no plain file (lost.txt)" in rows.ledger.table()
    assert texts_of(rows) == ["mm$", "aa$", "bb$", "cc$"]
    assert rows.ledger.empty_documents == 1
    table = rows.ledger.table()
    assert "1 file left out: binary (zero.txt)" in table
    assert "1 file left out: not UTF-8 (latin.txt)" in table
    assert "5 files left out: unknown ending (v.bin, w.bin, x.bin, …)" in table
    assert "1 file left out: records beside text (data.jsonl)" in table
    assert rows_of(tmp_path, source).ledger == rows.ledger


@pytest.mark.parametrize("run", [".", "run", "run/of/today"])
def test_a_run_beside_the_text_is_no_text(cached: Path, run: str) -> None:
    """`dataset_name: .` with an `output_dir` below: a resumed run would have other data, and `eval` would read the run."""
    text, records, split = cached / "text", cached / "records", cached / "split"
    jsonl(records / "a.jsonl", {"text": "aa"})
    for name in ("a.txt", "config.yaml"):
        text.mkdir(exist_ok=True)
        (text / name).write_text(name[0])
    for name in ("train", "test"):
        (split / name).mkdir(parents=True)
        (split / name / "a.txt").write_text(name)
    if run == ".":
        (text / "config.yaml").unlink()  # a run would have written over it

    def documents() -> list[list[str]]:
        # Rows are prepared anew: what was prepared before would be found again.
        return [texts_of(rows_of(cached / str(len(list(cached.iterdir()))), place)) for place in (text, records, split)]

    before = documents()
    for place in (text, records, split):
        write_run_facts(place / run, config={"max_length": 100}, facts={})
        (place / run / "metrics.jsonl").write_text('{"loss": 1}\n')
        for folder in ("model", "checkpoint-3"):
            (place / run / folder).mkdir()
            (place / run / folder / "README.md").write_text("how the adapter is loaded")
        if run != ".":  # files beside train/ and test/ make one split of them
            (place / run / "adapter_config.json").write_text("{}")
            (place / run / "README.md").write_text("how the adapter is loaded")
    assert documents() == before


def test_a_glob_takes_what_decodes_and_reads_records(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "deep/c.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[-5])
    (tmp_path / "broken.log").write_bytes(b"\xff\xfe")
    assert texts_of(rows_of(tmp_path, tmp_path / "*.log")) == ["a$", "b$"]
    assert texts_of(rows_of(tmp_path, tmp_path / "**/*.log")) == ["a$", "b$", "c$"]
    jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    assert texts_of(rows_of(tmp_path, tmp_path / "a.*")) == ["a$", "one$", "two$"]


def test_a_named_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfea\0")
    with pytest.raises(UserError, match=r"a\.txt is no text: binary"):
        rows_of(tmp_path, tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bok.txt", r"no file or folder '.*/bok.txt' in /.*; allowed: a text file, .* Did you mean /.*/book\.txt\?"),
        ("bin/x", r"no file or folder '.*/bin/x': /.* has no folder bin; .* There are the folders images, pipes, void\."),
        ("image/a.txt", r"has no folder image; .* Did you mean the folder /.*/images\?"),
        ("void/book.txt", r"no file or folder '.*/void/book.txt' in /.*/void; .* There is no file in it\."),
        ("book.txt.gzz", r"Did you mean /.*/book\.txt\.gz\?"),
        ("zzz.log", r"There are book\.txt, book\.txt\.gz, data\.csv, images and 2 more\."),
        ("*.md", "no file matches"),
        ("pipes/pipe", r"'.*/pipe' is a pipe or a device, not an ordinary file"),
        ("pipes/link.txt", r"'.*/link.txt' is a link to nothing"),
        ("book.txt.gz", "is packed"),
        ("data.csv", r"not read directly.*datasets: \[\{path: csv, data_files: .*data.csv\}\]"),
        ("void", "is an empty folder"),
        (
            "images",
            r"no file that is read: 1 file left out: unknown ending \(a.png\); .* such as /.*/images/\*\*/\*\.png",
        ),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, name: str, sentence: str) -> None:
    for file in ("book.txt", "book.txt.gz", "data.csv", "images/a.png"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    for folder in ("void", "pipes"):
        (tmp_path / folder).mkdir()
    os.mkfifo(tmp_path / "pipes" / "pipe")
    (tmp_path / "pipes" / "link.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=sentence):
        rows_of(tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    "name",
    ["bok.txt", "book.tx", "book.parquett", "boks/book.jsonll", "./books", "/books", "~/nowhere/books", "books/", "here/books",
     "a b", "some\\where", "book.bin", "a/b/c", "new*", "owner/data.json"],
)  # fmt: skip
def test_what_looks_like_a_path_is_never_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Half a minute of retries without network, and then a sentence about the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=r"no file or folder|no file matches"):
        rows_of(tmp_path / "cache", name)


@pytest.mark.parametrize("name", ["wikitext", "owner/books", "owner/data-v1.5", "allenai/c4", "owner/hh_rlhf.v2"])
def test_what_may_be_on_the_hub_is_asked_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError(f"Couldn't reach {name!r}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    monkeypatch.setattr(sources, "no_way_to_the_hub", lambda *_, **__: None)
    (tmp_path / "wiki.text").write_text("x")
    with pytest.raises(UserError, match=f"'{name}' is no file or folder in /.*, nor did the hub .*: Couldn't reach") as told:
        rows_of(tmp_path / "cache", name)
    assert ("Did you mean wiki.text here?" in str(told.value)) == (name == "wikitext")


def test_a_folder_below_that_may_not_be_read_is_not_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all" / "locked").mkdir(parents=True)
    (tmp_path / "all" / "book.txt").write_text("x")
    look = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"the folder .*/locked may not be read"):
        rows_of(tmp_path, tmp_path / "all")


def test_a_parquet_file_that_is_damaged_inside_is_a_sentence(cached: Path) -> None:
    """Its end, which is read first, is whole."""
    path = parquet(cached / "d.parquet", text=["one two three " * 200] * 50)
    data = bytearray(path.read_bytes())
    data[4:64] = bytes(60)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"d\.parquet is damaged behind record 0: .* Write or copy it again"):
        rows_of(cached, path)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": ' + "[" * 5000 + "]" * 5000 + "}", "line 1 is no JSON: it is nested too deeply"),
        ('{"text": "a" "b"}', "line 1 is no JSON: Expecting ',' delimiter, at character 14; allowed: one JSON object a line"),
        ('["a"]', r'line 1 holds a list; .* \{"text": "…"\}'),
        ('{"input_ids": [1, null]}', "column 'input_ids' holds a list with null in it; allowed: a flat list"),
        ('{"input_ids": [1, 99999999999999999999]}', "a list with a number beyond 64 bits"),
    ],
)
def test_a_line_that_cannot_be_read_says_what_is_wrong_with_it(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "d.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=sentence):
        rows_of(tmp_path, tmp_path / "d.jsonl")


def test_a_folder_of_files_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "latin.txt").write_bytes(b"\xe4\xf6")
    with pytest.raises(UserError, match=r"no row at all; .*; 1 file left out: not UTF-8 \(latin.txt\)"):
        rows_of(tmp_path, tmp_path / "all")


def test_a_name_that_is_nowhere(cached: Path) -> None:
    with pytest.raises(UserError, match=r"'nobody/data' is no file .* in the hub's cache, and HF_HUB_OFFLINE or HF_.* is set"):
        rows_of(cached, "nobody/data")


def test_without_a_way_to_the_hub_its_cache_alone_is_asked(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` asks six times, for 30 s, before it looks into its cache."""
    jsonl(cached / "a.jsonl", {"text": "a"}, {"text": "b"})
    kept = Path(datasets.load_dataset("json", data_files=str(cached / "a.jsonl")).cache_files["train"][0]["filename"]).parent
    moved = cached / "hf" / "owner___books" / "default" / "0.0.0" / kept.name
    moved.mkdir(parents=True)
    (moved / "books-train.arrow").write_bytes((kept / "json-train.arrow").read_bytes())
    info = json.loads((kept / "dataset_info.json").read_text())
    (moved / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "books", "config_name": "default"}))
    asked = []
    monkeypatch.setattr(sources, "no_way_to_the_hub", lambda name, *, kind: asked.append((name, kind)) or "no such host")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", lambda *_, **__: pytest.fail("the hub was asked"))
    assert texts_of(rows_of(cached, "owner/books")) == ["a$", "b$"]
    with pytest.raises(
        UserError, match=r"'owner/book' is no file .*, and the hub cannot be reached: no such host. Check"
    ) as told:
        rows_of(cached, "owner/book")
    assert "hf download --repo-type dataset owner/book --local-dir FOLDER" in str(told.value)
    assert asked == [("owner/books", "dataset"), ("owner/book", "dataset")]
    assert datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_with_a_text_column(cached: Path, kind: str) -> None:
    texts = ["one", None, "", "two", "three"]
    if kind == "jsonl":
        path = jsonl(cached / "d.jsonl", *({"n": 1, "text": text} for text in texts))
    else:
        path = parquet(cached / "d.parquet", n=[1] * 5, text=texts)
    assert texts_of(rows_of(cached, path)) == ["one$", "two$", "three$"]
    assert rows_of(cached, path).ledger.empty_documents == 2
    shuffled = texts_of(rows_of(cached, path, shuffle_dataset=True, seed=1))
    assert sorted(shuffled) == ["one$", "three$", "two$"]
    assert texts_of(rows_of(cached, path, max_rows=1)) == ["one$"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        ("txt", ["a"], "has no column 'text', only n, txt. Set dataset_text_field to 'txt', or"),
        ("text", [["a"]], "record 1: column 'text' holds a list of texts|line 1: column 'text' holds a list of texts"),
        ("text", [5], "column 'text' holds a number; allowed: text, or null"),
        ("messages", [[{"role": "user", "content": "x"}]], r"holds chats \(messages\), which are not built yet"),
        ("prompt", ["a"], r"holds prompts and completions \(prompt\), which are not built yet"),
        ("conversations", ["a"], r"holds chats \(conversations\)"),
        ("input_ids", [[1, -2]], "no token id; got -2"),
        ("input_ids", [[1.5]], "holds a list of fractions|holds ndarray|holds numbers"),
        ("input_ids", [[[1]]], "holds a list of lists"),
        ("input_ids", ["a"], "holds text; allowed: a flat list of whole numbers"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, kind: str, column: str, values: list[Any], sentence: str) -> None:
    if kind == "jsonl":
        path = jsonl(tmp_path / "d.jsonl", *({"n": 1, column: value} for value in values))
    else:
        path = parquet(tmp_path / "d.parquet", n=[1] * len(values), **{column: values})
    with pytest.raises(UserError, match=sentence):
        rows_of(tmp_path, path)


def test_a_line_without_the_column_is_no_empty_document(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"text": "a"}, {"txt": "b"})
    with pytest.raises(UserError, match=r"d.jsonl, line 2 has no column 'text', only txt"):
        rows_of(tmp_path, path)
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"line 2 is no JSON"):
        rows_of(tmp_path, path)
    path.write_text('["a"]\n')
    with pytest.raises(UserError, match=r"line 1 holds a list; allowed: one JSON object a line"):
        rows_of(tmp_path, path)


def test_text_field_and_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"body": "ab", "text": "cd", "input_ids": [70, 71]})
    assert texts_of(rows_of(tmp_path, path)) == ["FG"]
    assert texts_of(rows_of(tmp_path, path, dataset_text_field="body")) == ["ab$"]
    named = {"max_length": 100, "packing": False}
    assert texts_of(prepare(tmp_path / "c", datasets=[{"path": str(path), "columns": ["text"]}], **named)) == ["cd$"]
    with pytest.raises(UserError, match="has no column 'nope', which columns asks for; allowed: body, text, input_ids"):
        prepare(tmp_path / "c", datasets=[{"path": str(path), "columns": ["nope"]}], **named)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"labels": [1, 3]}, "labels differ from input_ids"),
        ({"labels": [1]}, "labels has 1 entries; allowed: as many as input_ids, 2"),
        ({"completion_mask": [0, 2]}, "completion_mask must hold only 0 and 1"),
        ({"attention_mask": [1, 0]}, "attention_mask hides tokens"),
        ({"position_ids": [0]}, "position_ids has 1 entries; allowed: as many as input_ids, 2"),
        ({"position_ids": [0, 3]}, "position_ids jump to 3 at token 1; allowed: positions that count up by one"),
        ({"position_ids": [1, 2]}, "position_ids jump to 1 at token 0"),
        ({"seq_lengths": [1, 2]}, "seq_lengths are not the lengths .* got a sum of 3 for 2 tokens"),
        ({"seq_lengths": [2, 0]}, "seq_lengths are not the lengths"),
        ({"seq_lengths": [1, 1], "position_ids": [0, 1]}, "say different documents"),
    ],
)
def test_ids_with_something_that_would_be_ignored(tmp_path: Path, extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        rows_of(tmp_path, jsonl(tmp_path / "d.jsonl", {"input_ids": [1, 2], **extra}))


def test_a_completion_mask_is_kept(tmp_path: Path) -> None:
    record = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "attention_mask": [1, 1, 1, 1]}
    assert rows_of(tmp_path, jsonl(tmp_path / "d.jsonl", record))[0].labels.tolist() == [-100, -100, 7, 8]


def test_a_token_is_trained_where_every_mask_trains_it(tmp_path: Path) -> None:
    record = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, -100, 8], "assistant_masks": [1, 0, 1, 1]}
    assert rows_of(tmp_path, jsonl(tmp_path / "d.jsonl", record))[0].labels.tolist() == [-100, -100, -100, 8]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_null_ids_are_an_empty_document(tmp_path: Path, kind: str) -> None:
    values = [[5, 6], None, [7]]
    if kind == "jsonl":
        path = jsonl(tmp_path / "d.jsonl", *({"input_ids": value} for value in values))
    else:
        path = parquet(tmp_path / "d.parquet", input_ids=values)
    rows = rows_of(tmp_path, path, packing=True)
    assert rows[0].input_ids.tolist() == [5, 6, 7]
    assert rows.ledger.empty_documents == 1


def test_json_lines_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\r\n{"text": "cd"}')
    assert texts_of(rows_of(tmp_path, tmp_path / "d.jsonl")) == ["ab$", "cd$"]


def test_a_folder_of_records_with_splits(cached: Path) -> None:
    """As on the hub: data/train-*.parquet beside a README that is no document."""
    hub = cached / "hub"
    parquet(hub / "data" / "train-00000-of-00001.parquet", text=["a", "b"])
    parquet(hub / "data" / "test-00000-of-00001.parquet", text=["c"])
    (hub / "README.md").write_text("about")
    assert texts_of(rows_of(cached, hub)) == ["a$", "b$"]
    assert rows_of(cached, hub).reused
    assert texts_of(rows_of(cached, hub, split="test")) == ["c$"]
    assert texts_of(rows_of(cached, hub, dataset_streaming=True)) == ["a$", "b$"]
    assert rows_of(cached, hub, dataset_streaming=True).reused
    assert texts_of(rows_of(cached, hub, dataset_train_split="train[:1]")) == ["a$"]
    with pytest.raises(UserError, match=r"has no split 'valid'; allowed: (train, test|test, train)"):
        rows_of(cached, hub, dataset_train_split="valid")
    with pytest.raises(UserError, match="shuffle_dataset needs every document within reach"):
        rows_of(cached, hub, dataset_streaming=True, shuffle_dataset=True)
    with pytest.raises(UserError, match=r"\(name: french\) cannot be opened: .*Available: \['default'\]"):
        rows_of(cached, hub, dataset_config="french")


def test_a_folder_of_json_lines(cached: Path) -> None:
    """Read line by line where nothing names a split; through `datasets` where something does."""
    jsonl(cached / "plain" / "b.jsonl", {"text": "b"})
    jsonl(cached / "plain" / "a" / "a.jsonl", {"text": "a", "odd": 1}, {"text": "aa", "odd": ["x"]})
    assert texts_of(rows_of(cached, cached / "plain")) == ["a$", "aa$", "b$"]
    with pytest.raises(UserError, match="files are one split"):
        rows_of(cached, cached / "plain", split="test")
    jsonl(cached / "named" / "train.jsonl", {"text": "a"})
    jsonl(cached / "named" / "test.jsonl", {"text": "b"})
    assert texts_of(rows_of(cached, cached / "named")) == ["a$"]
    assert texts_of(rows_of(cached, cached / "named", split="test")) == ["b$"]
    (cached / "named" / "train.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(UserError, match="named cannot be prepared: "):
        rows_of(cached, cached / "named")


def test_a_folder_that_datasets_wrote(cached: Path) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b"]})
    data.save_to_disk(str(cached / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(cached / "two"))
    assert texts_of(rows_of(cached, cached / "one")) == ["a$", "b$"]
    assert rows_of(cached, cached / "one").reused
    assert texts_of(rows_of(cached, cached / "two", split="test")) == ["b$"]
    with pytest.raises(UserError, match="it was saved as one dataset"):
        rows_of(cached, cached / "one", split="test")
    with pytest.raises(UserError, match="has no split 'x'; allowed: test, train"):
        rows_of(cached, cached / "two", dataset_train_split="x")


def test_a_format_with_data_files(cached: Path) -> None:
    (cached / "d.csv").write_text("text,n\nab,1\ncd,2\n")
    entry = {"path": "csv", "data_files": str(cached / "d.csv")}
    assert texts_of(prepare(cached / "c", datasets=[entry], max_length=100, packing=False)) == ["ab$", "cd$"]


def test_several_datasets_in_their_order(cached: Path) -> None:
    (cached / "a.txt").write_text("aa")
    entries = [{"path": str(jsonl(cached / "b.jsonl", {"text": "bb"}))}, {"path": str(cached / "a.txt")}]
    rows = prepare(cached / "c", datasets=entries, max_length=100, packing=False)
    assert texts_of(rows) == ["bb$", "aa$"]
    assert [source.documents for source in rows.ledger.sources] == [1, 1]


def test_local_files_have_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aa")
    with pytest.raises(UserError, match="is local, so it has no configuration 'french'"):
        rows_of(tmp_path, tmp_path / "a.txt", dataset_config="french")


@pytest.mark.parametrize(
    "data",
    [
        ["ab", "cd"],
        [{"text": "ab"}, {"text": "cd"}],
        [[97, 98, 1], [99, 100, 1]],
        np.array([[97, 98, 1], [99, 100, 1]]),
        torch.tensor([[97, 98, 1], [99, 100, 1]]),
        datasets.Dataset.from_dict({"text": ["ab", "cd"]}),
        datasets.Dataset.from_dict({"input_ids": [[97, 98, 1], [99, 100, 1]]}),
        datasets.Dataset.from_dict({"input_ids": [[97, 98, 1], [99, 100, 1]]}).with_format("torch"),
        datasets.Dataset.from_dict({"text": ["ab", "no", "cd"]}).select([0, 2]),
        datasets.Dataset.from_dict({"text": ["ab", "cd"]}).to_iterable_dataset(),
        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["ab", "cd"]})}),
    ],
    ids=lambda data: type(data).__name__,
)
def test_data_from_python(tmp_path: Path, data: Any) -> None:
    rows = prepare(tmp_path, data, max_length=100, packing=False)
    assert texts_of(rows) == ["ab$", "cd$"]
    again = prepare(tmp_path, data, max_length=100, packing=False)
    assert again.reused == (not isinstance(data, datasets.IterableDataset))
    assert again.fingerprint == rows.fingerprint
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (iter(["a"]), "this object holds no documents"),
        ({"text": ["a"]}, r"cannot be a mapping \(of text\)"),
        ([{"txt": "a"}], "the list has no column 'text', only txt"),
        ([5], "the list, item 0 holds a number"),
        (datasets.Dataset.from_dict({"txt": ["a"]}), "the dataset has no column 'text', only txt"),
        (datasets.DatasetDict({"all": datasets.Dataset.from_dict({"text": ["a"]})}), "no split 'train'; allowed: all"),
        ("nowhere/at/all.txt", "has no folder nowhere"),
    ],
)
def test_python_data_that_cannot_be_read(tmp_path: Path, data: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        prepare(tmp_path, data)


def test_an_iterable_dataset_is_not_read_further_than_needed(tmp_path: Path) -> None:
    seen = []

    def records() -> Any:
        for number in range(1000):
            seen.append(number)
            yield {"text": "x" * 10_000}

    stream = datasets.IterableDataset.from_generator(records)
    rows = prepare(tmp_path, stream, max_length=100, max_rows=3)
    assert len(rows) == 3
    assert len(seen) < 20
    with pytest.raises(UserError, match="an IterableDataset gives them one by one"):
        prepare(tmp_path, stream, shuffle_dataset=True)


def test_streams_with_the_same_rows_and_another_ledger(tmp_path: Path) -> None:
    """A stream is known by its content only once it was read; the ledger is part of it."""
    kept = datasets.Dataset.from_dict({"text": ["ab"]}).to_iterable_dataset()
    more = datasets.Dataset.from_dict({"text": ["ab", None]}).to_iterable_dataset()
    assert prepare(tmp_path, kept).ledger.empty_documents == 0
    assert prepare(tmp_path, more).ledger.empty_documents == 1


def test_parquet_batches_are_measured_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R81: a few documents of 800 MB must never meet in one Arrow array."""
    from megaspan.data import tables

    monkeypatch.setattr(tables, "_BATCH_BYTES", 1000)
    path = parquet(tmp_path / "d.parquet", text=[letter * 900 for letter in "abcdef"])
    sizes = []
    original = tables._arrow_records
    monkeypatch.setattr(tables, "_arrow_records", lambda table: sizes.append(table.num_rows) or original(table))
    rows = rows_of(tmp_path, path, max_length=1000)
    assert [text[0] for text in texts_of(rows)] == list("abcdef")
    assert max(sizes) <= 2
    assert tables._batch_size(3 * 800 * 2**20, 3) == 1
    assert tables._batch_size(0, 0) == 1000
