"""The pages say what is there: their files, verbs, options, configurations and links are checked against the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaspan import SFTConfig
from megaspan.cli import VERBS
from megaspan.config import load_config
from megaspan.config.schema import GROUPS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".toml", ".txt", ".json", ".cfg", ""}


def tracked() -> list[Path]:
    """Files of the repository that hold text; outside a git checkout, those that a source archive has."""
    try:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        kept = ("src", "tests", "docs", "examples", "benchmarks")
        found = [
            *ROOT.glob("*.*"),
            *(path for name in kept for path in (ROOT / name).rglob("*") if "__pycache__" not in path.parts),
        ]
        names = [str(path.relative_to(ROOT)) for path in found]
    return [ROOT / name for name in names if name and (ROOT / name).is_file() and Path(name).suffix in SUFFIXES]


TRACKED = tracked()
PAGES = sorted({path for path in TRACKED if path.suffix == ".md"} | {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(text) if found == language]


def tree() -> dict[str, str]:
    """Paths of the README's tree, relative to the repository, each with its phrase."""
    lines = README.split("<!-- tree -->")[1].split("```")[1].strip("\n").splitlines()
    folder, entries = "", {}
    for line in lines:
        name, _, phrase = line.strip().partition("  ")
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            entries[name] = phrase.strip()
        else:
            entries[folder + name] = phrase.strip()
    return entries


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# The README


def test_the_tree_names_what_exists_and_every_module():
    entries = tree()
    for name in entries:
        path = ROOT / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), f"{name} of the README's tree does not exist"
    package = ROOT / "src" / "megaspan"
    modules = {path.name + ("/" if path.is_dir() else "") for path in package.iterdir()} - {"__init__.py", "__pycache__/"}
    missing = modules - {name.removeprefix("src/megaspan/") for name in entries}
    assert not missing, f"the README's tree lacks {sorted(missing)}"
    bare = [name for name, phrase in entries.items() if not phrase and name not in ("docs/", "examples/", "src/megaspan/")]
    assert not bare, f"no phrase says what these are: {bare}"


def test_every_verb_is_in_the_command_line_table_and_no_other():
    table = README.split("\n## Command line\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `megaspan (\w+)", table, re.MULTILINE)) == set(VERBS)


def test_every_option_group_is_in_the_readme():
    table = README.split("| group | of what |")[1].split("\n\n")[0]
    assert re.findall(r"^\| ([A-Z][\w ]+) \|", table, re.MULTILINE) == [title for title, _ in GROUPS]


def test_making_the_environment_shows_what_it_is_at():
    """It takes minutes, in which `pip install -q` says nothing."""
    recipe = (ROOT / "Makefile").read_text("utf-8").split("$(READY):")[1]
    assert re.search(r"\becho .* downloads torch", recipe)
    assert re.search(r"pip install (?!-q|--quiet)", recipe)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_of_the_pages_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for body in (part for language in ("sh", "") for part in blocks(path.read_text("utf-8"), language)):
        for line in body.splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["make"] and len(words) > 1:
                assert words[1] in targets, line
            if words[:1] == ["megaspan"] and len(words) > 1:
                assert words[1] in VERBS, line
                flags = [word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
                assert set(flags) <= set(SFTConfig.model_fields) | set(VERBS[words[1]].own), line


def test_the_extras_of_the_readme_exist():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    table = README.split("| extra | brings | for |")[1].split("\n\n")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    assert set(listed) == set(extras) - {"demo", "dev"}
    assert {name: set(brings.split(", ")) for name, brings in listed.items()} == {name: set(extras[name]) for name in listed}


# Configurations and programs


YAML_BLOCKS = [(name_of(path), body) for path in PAGES for body in blocks(path.read_text("utf-8"), "yaml")]
YAML_FILES = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def test_the_readme_has_a_configuration():
    assert "README.md" in [name for name, _ in YAML_BLOCKS]


@pytest.mark.parametrize(("name", "body"), YAML_BLOCKS, ids=[name for name, _ in YAML_BLOCKS])
def test_configurations_of_the_pages_load(name, body, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(body)
    assert load_config(path, []).max_length > 0


@pytest.mark.parametrize("path", YAML_FILES, ids=name_of)
def test_configurations_of_the_examples_load(path):
    if "compute_environment" in yaml.safe_load(path.read_text("utf-8")):  # a launch file of accelerate
        return
    assert load_config(path, []).max_length > 0


PROGRAMS = [(name_of(path), body) for path in PAGES for body in blocks(path.read_text("utf-8"), "python")]


@pytest.mark.parametrize(("name", "body"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_programs_of_the_pages_name_what_exists(name, body):
    """They parse, import names that megaspan has, and their `SFTConfig(...)` is accepted."""
    import megaspan

    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.ImportFrom) and node.module == "megaspan":
            assert {alias.name for alias in node.names} <= set(megaspan.__all__)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SFTConfig":
            SFTConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords})


# Links and paths


def heading_marks(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(path):
    text = BLOCK.sub("", path.read_text("utf-8"))
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, mark = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{link} does not exist"
        if mark and there.suffix == ".md":
            assert mark in heading_marks(there.read_text("utf-8")), f"{link} has no such heading"


DESCRIBING = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


@pytest.mark.parametrize("path", DESCRIBING, ids=name_of)
def test_modules_named_by_the_architecture_and_the_decisions_exist(path):
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.py)`", path.read_text("utf-8"))
    assert path.name != "architecture.md" or len(named) > 20
    for name in named:
        assert any((base / name).exists() for base in (ROOT, ROOT / "src" / "megaspan")), f"{name} does not exist"


def test_decisions_have_their_four_parts_on_one_page():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:3] for page in pages] == [f"{number:03}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text("utf-8")
        assert text.startswith(f"# {page.name[:3]} ")
        assert [
            part for part in ("**Context.**", "**Choice.**", "**Rejected.**", "**We were wrong if**") if part not in text
        ] == []
        assert text.count("\n") <= 60, page.name


def test_no_tracked_text_names_a_path_of_the_machine_it_was_made_on():
    # Written in parts, so that this file does not name them either; this checkout and this Python count where they are deep.
    own = [str(path) for path in (ROOT, Path(sys.prefix)) if len(path.parts) > 3]
    places = ["/" + "work/", "/" + "opt/ms", "/" + "root/", *own]
    found = []
    for path in TRACKED:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(path)}: {place}" for place in places if re.search(rf"(?<![\w.]){re.escape(place)}", text)]
    assert not found


def test_the_changelog_has_this_version():
    from megaspan import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
