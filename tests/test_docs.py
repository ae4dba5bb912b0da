"""The documents are true: every Python block runs, every command exists, every field, path and link is there.

Each rule is a function from a text to a list of complaints (or an exception), so that a sibling test can feed it a text
that is wrong on purpose.
"""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tlt_kernels
import tlt_kernels.linear
import typer

import tlt_engine
from bench.tables import render
from tests.tiny import tiny_hf_model
from tlt_engine.cli.main import app
from tlt_engine.config import EngineConfig, SamplingParams, SpeculationConfig
from tlt_engine.outputs import CompletionOutput, Logprob, RequestOutput

ROOT = Path(__file__).resolve().parent.parent
DOCS = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md"))]
MODEL = "path/to/model"  # what the documents call a model folder
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PATH_BASES = ("", "tlt_engine", "tlt_engine/models", "kernels/tlt_kernels")  # where a file named in a text may stand


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer of 257 ids, the EOS last; the head has 15 padding rows beyond."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    tiny_hf_model(vocab_size=272, eos_token_id=256).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    assert len(fast) == 257 and fast.decode(fast.encode("What is 7 * 8?")) == "What is 7 * 8?"
    fast.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- Python blocks


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of the first line of code, counted from 1
    text: str


def blocks(text: str, language: str) -> list[Block]:
    found = [Block(m[1], text.count("\n", 0, m.start()) + 2, m[2]) for m in FENCE.finditer(text)]
    return [block for block in found if block.language == language]


def run_python(text: str, name: str, model: Path) -> dict[str, Any]:
    """Run the Python blocks of a document in order in one namespace. Tracebacks have the document's line numbers."""
    space: dict[str, Any] = {"__name__": "document"}
    for block in blocks(text, "python"):
        source = "\n" * (block.line - 1) + block.text.replace(MODEL, model.as_posix())
        exec(compile(source, str(ROOT / name), "exec"), space)
    return space


@pytest.mark.parametrize("name", [n for n in DOCS if blocks((ROOT / n).read_text(), "python")])
def test_python_blocks_run(name: str, model: Path) -> None:
    run_python((ROOT / name).read_text(), name, model)


def test_documents_that_should_have_code_have_it() -> None:
    counts = {name: len(blocks((ROOT / name).read_text(), "python")) for name in DOCS}
    expected = {"README.md": 1, "seeds.md": 5, "guarantees.md": 3, "from-vllm.md": 2, "design.md": 1,
                "trl.md": 1, "custom-loop.md": 1}
    assert {Path(n).name: c for n, c in counts.items() if c}.keys() == expected.keys()
    assert all(counts[n] >= expected[Path(n).name] for n in counts if counts[n]), counts


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("token == sample.token_ids[5]", "token != sample.token_ids[5]"),
        ("samples=one * 2", "samples=one * 1"),  # the sample index dropped from the identity
        ("positions=one * len(before)", "positions=one * 5"),  # counted from the output's start
        ('array("q", [seed, *ids])', 'array("q", [seed])'),  # the prompt dropped from the key
    ],
)
def test_a_wrong_block_fails(right: str, wrong: str, model: Path) -> None:
    text = (ROOT / "docs/seeds.md").read_text()
    assert text.count(right) == 1
    with pytest.raises(AssertionError):
        run_python(text.replace(right, wrong), "docs/seeds.md", model)


def test_the_readme_example_is_short() -> None:
    example = blocks((ROOT / "README.md").read_text(), "python")[0].text
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 20


def test_the_example_program_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(ROOT / "examples" / "embed.py")
    monkeypatch.setattr(sys, "argv", [program, str(model), "--prompt", "2 + 2 =", "--n", "3", "--max-tokens", "12"])
    runpy.run_path(program, run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("advantage") == 3 and "accept length" in printed


# ---------------------------------------------------------------- commands


def command_lines(text: str) -> Iterator[list[str]]:
    """The commands of all bash blocks, as words; comments and leading VAR=value dropped."""
    for block in blocks(text, "bash"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=\S*", words[0]):
                words = words[1:]
            if words:
                yield words


def command_complaints(text: str) -> list[str]:
    """What is wrong with the commands of a document. A command that cannot be checked here is wrong, too."""
    return [complaint for words in command_lines(text) if (complaint := _complaint(words)) is not None]


def _complaint(words: list[str]) -> str | None:
    shown = shlex.join(words)
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        missing = [word for word in words[1:] if word not in targets]
        return f"{shown}: no target {missing}" if missing else None
    if words[0] == "tlt":
        return _tlt_complaint(words[1:], shown)
    if words[:2] == ["python", "-m"]:
        return None if find_spec(words[2]) else f"{shown}: no module {words[2]}"
    if words[0] == "python" and words[1].startswith("examples/"):  # tests/rl/test_examples.py runs them
        return _example_complaint(ROOT / words[1], words[2:], shown)
    return f"{shown}: not a command that this test knows"


def _example_complaint(program: Path, words: list[str], shown: str) -> str | None:
    if not program.is_file():
        return f"{shown}: no such program"
    known = set(re.findall(r"add_argument\(\"(--[\w-]+)\"", program.read_text()))
    unknown = [word for word in words if word.startswith("--") and word not in known]
    return f"{shown}: no option {unknown}" if unknown else None


def _tlt_complaint(words: list[str], shown: str) -> str | None:
    group = typer.main.get_command(app)
    command = group.commands.get(words[0]) if words else None  # type: ignore[attr-defined]
    if command is None:
        return f"{shown}: no such subcommand"
    try:
        command.make_context(words[0], list(words[1:]))  # parses and converts; runs nothing
    except Exception as error:  # typer carries its own copy of click's exceptions
        return f"{shown}: {getattr(error, 'message', error)}"
    return None


@pytest.mark.parametrize("name", DOCS)
def test_commands_exist(name: str) -> None:
    assert command_complaints((ROOT / name).read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "make everything", "tlt chek path/to/model", "tlt check path/to/model --drafters x", "tlt check",
        "tlt generate path/to/model --n many", "python -m bench.nothing", "rm -rf build",
    ],
)
def test_a_wrong_command_is_seen(line: str) -> None:
    good = "make demo  # a comment\nOMP_NUM_THREADS=1 tlt env --json\n"
    assert command_complaints(f"```bash\n{good}```\n") == []
    assert len(command_complaints(f"```bash\n{good}{line}\n```\n")) == 1


# ---------------------------------------------------------------- fields, files, links, tables


def names_in(text: str) -> set[str]:
    """Identifiers in backticks; the last part of dotted ones."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return {name for code in quoted for name in re.findall(r"\w+", code)}


def unnamed(text: str) -> list[str]:
    """Fields and methods that a page about all of them leaves out."""
    public: dict[str, set[str]] = {
        cls.__name__: {f.name for f in fields(cls)}
        for cls in (SamplingParams, EngineConfig, SpeculationConfig, RequestOutput, CompletionOutput)
    }
    public["Logprob"] = set(Logprob._fields)
    return sorted(f"{cls}.{name}" for cls, wanted in public.items() for name in wanted - names_in(text))


def table_rows(text: str, heading: str) -> Iterator[tuple[bool, list[str]]]:
    """(is below "Missing:", cells) of the tables in a section."""
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    missing = False
    for line in section.splitlines():
        missing |= line.startswith("Missing:")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "---" not in line and "vLLM" not in cells[0]:
            yield missing, cells


def wrong_rows(text: str) -> list[str]:
    """Rows of the parameter tables that name a field we do not have, or call missing what we have."""
    sections = {
        "`SamplingParams`": {f.name for f in fields(SamplingParams)},
        "`LLM(...)` and `EngineConfig`": {f.name for cls in (EngineConfig, SpeculationConfig) for f in fields(cls)},
        "Methods": {name for name in dir(tlt_engine.RolloutEngine) if not name.startswith("_")} | {"tokenizer"},
    }
    wrong = []
    for heading, ours in sections.items():
        for missing, cells in table_rows(text, heading):
            named = set(re.findall(r"`([a-z]\w*)`", cells[0 if missing else 1]))
            wrong += [f"{heading}: {name}" for name in (named & ours if missing else named - ours)]
    return wrong


def lost_files(text: str, folder: Path) -> list[str]:
    """Relative links and file names in backticks that lead nowhere."""
    links = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not t.startswith(("http", "#"))]
    files = re.findall(r"`([\w./-]+\.(?:py|h|cpp|cu|md|toml|txt))`", text)
    lost = [link for link in links if not (folder / link).exists()]
    return lost + [file for file in files if not any((ROOT / base / file).exists() for base in PATH_BASES)]


def test_the_page_for_vllm_users_names_every_field() -> None:
    text = (ROOT / "docs/from-vllm.md").read_text()
    assert unnamed(text) == []
    assert unnamed(text.replace("`presence_penalty`", "")) == ["SamplingParams.presence_penalty"]


def test_the_tables_for_vllm_users_are_right() -> None:
    text = (ROOT / "docs/from-vllm.md").read_text()
    assert wrong_rows(text) == []
    assert wrong_rows(text.replace("| `block_size` | `page_size` |", "| `block_size` | `block_size` |")) != []
    assert wrong_rows(text.replace("| `bad_words` |", "| `min_tokens` |")) != []


def op_complaints(text: str) -> list[str]:
    """Ops in the list of docs/design.md that do not exist so, and ops of tlt_kernels that it leaves out."""
    listed = text.split("\n## Ops", 1)[1]
    signatures = re.findall(r"^    (\w+)\((.*?)\) -> ", listed, re.M | re.S)
    wrong = [f"{op} is not listed" for op in tlt_kernels.__all__ if op.islower() and op not in dict(signatures)]
    for op, arguments in signatures:
        found = getattr(tlt_kernels, op)
        known = inspect.signature(getattr(found, op) if inspect.ismodule(found) else found).parameters
        wrong += [f"{op}: no argument {name}" for name in re.findall(r"(\w+)=", arguments) if name not in known]
    return wrong


def test_the_listed_ops_exist() -> None:
    text = (ROOT / "docs/design.md").read_text()
    assert op_complaints(text) == []
    assert op_complaints(text.replace("forced=None", "given=None")) == ["sample: no argument given"]
    assert op_complaints(text.replace("    verify_tree(", "    ")) == ["verify_tree is not listed"]


@pytest.mark.parametrize("refused", ["best_of", "guided_decoding", "bad_words", "truncate_prompt_tokens"])
def test_missing_parameters_are_refused_by_name(refused: str) -> None:
    assert f"`{refused}`" in (ROOT / "docs/from-vllm.md").read_text()
    with pytest.raises(TypeError, match=refused):
        SamplingParams(**{refused: 1})


@pytest.mark.parametrize("name", [*DOCS, "CHANGELOG.md"])
def test_links_and_files_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    assert lost_files(text, (ROOT / name).parent) == []
    wrong = text + "\n[gone](gone.md) and `engine/gone.py`, [here](#top), [there](https://example.org/x.md)"
    assert lost_files(wrong, (ROOT / name).parent) == ["gone.md", "engine/gone.py"]


@pytest.mark.parametrize("name", DOCS)
def test_result_tables_can_be_made(name: str) -> None:
    text = (ROOT / name).read_text()
    render(text)
    with pytest.raises(ValueError, match="markers"):
        render(text + "\n<!-- bench:core -->\n")
