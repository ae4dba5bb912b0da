"""Importing and building engines in forked and spawned processes, and what travels between them."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest

from tests.engine.engines import plain_outputs, tiny_engine, tokens
from tlt_engine import SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
PARAMS = SamplingParams(max_tokens=20, seed=5)


def roll_out(queue) -> None:
    queue.put(tokens(tiny_engine().generate(PROMPTS, PARAMS)))


def go_on(queue, paused: bytes) -> None:
    queue.put(tokens(tiny_engine().resume(pickle.loads(paused))))


def in_process(method: str, target, *args):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=target, args=(queue, *args))
    process.start()
    result = queue.get(timeout=120)
    process.join(30)
    assert process.exitcode == 0
    return result


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_rolls_out_as_its_parent_does(method):
    """Forked after the parent's engine has run: its threads and pools are not there in the child."""
    expected = plain_outputs(PROMPTS, PARAMS)
    assert in_process(method, roll_out) == expected


def test_a_paused_rollout_goes_on_in_another_process():
    paused = tiny_engine().generate(PROMPTS, PARAMS, token_quota=7)
    assert in_process("spawn", go_on, pickle.dumps(paused)) == plain_outputs(PROMPTS, PARAMS)
