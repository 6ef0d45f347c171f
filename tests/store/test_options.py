"""Which options a resume has otherwise than its run."""

from __future__ import annotations

from pathlib import Path

from megaspan import SFTConfig
from megaspan.store.options import changed_options, plain
from megaspan.store.run import write_run_facts
from megaspan.trainer.resumed import OF_THE_RUN, OF_THE_UPDATE


def test_changed_options_are_those_that_the_run_folder_has_otherwise(tmp_path: Path) -> None:
    before = SFTConfig(max_length="4k", datasets=[{"path": "a.txt"}], lora_target_modules=["q_proj"], use_peft=True)
    write_run_facts(tmp_path, config=before.resolved(), facts={})
    assert changed_options(tmp_path, before.resolved()) == {}
    now = before.replace(max_length=2048, datasets=[{"path": "b.txt"}])
    found = changed_options(tmp_path, now.resolved())
    assert found["max_length"] == (4096, 2048)
    assert {name: now for name, (_, now) in found.items()} == {"max_length": 2048, "datasets": [plain(now.datasets[0])]}
    assert changed_options(tmp_path, {"max_length": 2048, "new_option": 1}).keys() == {"max_length"}


def test_a_folder_without_options_names_none(tmp_path: Path) -> None:
    assert changed_options(tmp_path, {"max_length": 1}) == {}
    for text in ("- a", "{", ""):
        (tmp_path / "config.yaml").write_text(text)
        assert changed_options(tmp_path, {"max_length": 1}) == {}


def test_every_option_of_an_identity_exists() -> None:
    assert {*OF_THE_RUN, *OF_THE_UPDATE} <= SFTConfig.model_fields.keys()
