"""A drafter from scratch, on the engine's own rollouts, in a minute or so: what it accepts on held-out prompts, counted
by the engine, against itself untrained and against bigram counts of the same rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tlt_kernels import NoiseIds, gumbel_noise
from torch import Tensor

from tests.tiny import tiny_hf_model
from tlt_engine import DraftContext, DraftTree, EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.loss import LossConfig
from tlt_engine.training.trainer import DrafterTrainer, TrainerConfig

VOCAB, LENGTH, STEPS = 64, 64, 1000
ONE = Profile(depth=1, top_k=1, verify=2)  # one draft a pass: what is accepted of it is K = 1 at the first position


def structured_target() -> Any:
    """A random two-layer model whose next token depends on the last one and on a slowly moving mean over the context:
    near-uniform attention with a strong output, weak feed-forward layers. The first is in the embedding that the
    drafter is given, the second in the hidden states one position before, so there is something to learn beyond
    bigrams. The head's scale sets the entropy."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12}
    hf = tiny_hf_model(vocab_size=VOCAB, hidden_size=48, intermediate_size=96, **heads)
    with torch.no_grad():
        hf.model.embed_tokens.weight.mul_(48**0.5)
        hf.lm_head.weight.mul_(3.2)
        for layer in hf.model.layers:
            layer.self_attn.q_proj.weight.mul_(0.1)
            layer.self_attn.o_proj.weight.mul_(1.5)
            layer.mlp.down_proj.weight.mul_(0.1)
    return hf


def prompts(count: int, seed: int) -> list[list[int]]:
    return torch.randint(VOCAB, (count, 4), generator=torch.Generator().manual_seed(seed)).tolist()


class BigramDrafter:
    """One draft: the best of log q(. | last token) + noise, q from counts, backed off to single tokens."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        counts = torch.zeros(VOCAB, VOCAB)
        for text in texts:
            ids = torch.tensor(text)
            counts.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
        single = (counts.sum(0) + 0.1) / (counts.sum() + 0.1 * VOCAB)
        self.log_q = ((counts + 2 * single) / (counts.sum(1, keepdim=True) + 2)).log()

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        scores = self.log_q[[c.token_ids[-1] for c in contexts]]
        rows = [[c.key, len(c.token_ids), c.sample, c.segment] for c in contexts]
        noise = gumbel_noise(NoiseIds(*torch.tensor(rows).T.contiguous()), VOCAB)
        hot = torch.tensor([c.params.temperature > 0 for c in contexts])
        best = (scores + noise * hot[:, None]).argmax(-1).tolist()
        return [
            DraftTree.chain(c.token_ids[-1], [t] if c.max_depth and c.max_nodes > 1 else [])
            for c, t in zip(contexts, best)
        ]

    def observe(self, context: DraftContext, accepted: int) -> None: ...

    def finish(self, seq_id: int) -> None: ...

    def memory_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Measured:
    accepted: float  # share of first drafts that the target took
    entropy: float  # of the target on its own text, nats
    tokens: list[list[int]]


def measure(model: Any, drafter: Any, temperature: float) -> Measured:
    """On held-out prompts, the same noise for every drafter."""
    method = "learned" if isinstance(drafter, EagleModel) else "custom"
    config = EngineConfig(max_num_seqs=32, speculation=SpeculationConfig(method=method, profile=ONE, min_chance=0.0))
    engine = RolloutEngine(model, config, drafter=drafter)
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=11)
    outputs = [output.outputs[0] for output in engine.generate(prompts(64, seed=2), params)]
    drafted = sum(o.spec.drafted_per_position[0] for o in outputs)
    accepted = sum(o.spec.accepted_per_position[0] for o in outputs)
    assert drafted > 0.9 * sum(o.spec.passes for o in outputs)
    logprobs = [lp for o in outputs for lp in o.sampled_logprobs]
    return Measured(accepted / drafted, -sum(logprobs) / len(logprobs), [o.token_ids for o in outputs])


def rollouts(model: Any, config: EagleConfig) -> tuple[RolloutEngine, HiddenStateBuffer, list[list[int]]]:
    """The training set, and its hidden states, captured while it is generated."""
    engine = RolloutEngine(model, EngineConfig(max_num_seqs=64, speculation=SpeculationConfig(method="off")))
    target = engine.model
    buffer = HiddenStateBuffer(
        config.aux_layers, target.config.num_layers, target.config.hidden_size, byte_budget=2**26
    )
    engine.record_hidden(buffer)
    outputs = engine.generate(prompts(512, seed=1), SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=3))
    engine.stop_recording(buffer)
    return engine, buffer, [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]


@dataclass(frozen=True)
class Learned:
    untrained: Measured
    bigram: Measured
    trained: Measured
    greedy: Measured  # the trained one at temperature 0


def learned_from_scratch() -> Learned:
    model = structured_target()
    engine = RolloutEngine(model)
    drafter = EagleModel(EagleConfig.for_target(engine.model.config)).bind(engine.model)
    drafter.initialise(torch.Generator().manual_seed(0))
    untrained = measure(model, drafter, 1.0)
    engine, buffer, texts = rollouts(model, drafter.config)
    assert buffer.stats()["pairs"] == sum(len(text) - 2 for text in texts)  # the last token was never an input
    drafter.bind(engine.model)
    config = TrainerConfig(
        lr=8e-3, clip=1.0, micro_rows=1024, warmup_steps=20, decay_steps=STEPS, loss=LossConfig(steps=1)
    )
    trainer = DrafterTrainer(drafter, buffer, config)
    while trainer.steps < STEPS:
        trainer.step()
    return Learned(
        untrained, bigram=measure(model, BigramDrafter(texts), 1.0), trained=measure(model, drafter, 1.0),
        greedy=measure(model, drafter, 0.0),
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drafter_from_scratch_learns_its_target() -> None:
    found = learned_from_scratch()
    assert 1.0 < found.trained.entropy < 2.5
    # drafters change the speed, never the text
    assert found.untrained.tokens == found.trained.tokens == found.bigram.tokens
    assert found.untrained.accepted < 0.30 and found.greedy.accepted >= 0.80
    assert found.trained.accepted >= found.untrained.accepted + 0.40
    assert found.trained.accepted >= 1.3 * found.bigram.accepted


@pytest.mark.slow
def test_sabotage_rows_of_the_wrong_position_teach_nothing() -> None:
    """The same training with tokens one position off stays at what single tokens give."""
    model = structured_target()
    config = EagleConfig.for_target(RolloutEngine(model).model.config)
    engine, buffer, _ = rollouts(model, config)
    for record in buffer._closed.values():
        assert isinstance(record.tokens, Tensor)
        record.tokens = record.tokens.roll(1)
    drafter = EagleModel(config).bind(engine.model)
    drafter.initialise(torch.Generator().manual_seed(0))
    trainer = DrafterTrainer(
        drafter, buffer, TrainerConfig(lr=8e-3, clip=1.0, micro_rows=1024, warmup_steps=20, loss=LossConfig(steps=1))
    )
    while trainer.steps < 150:
        trainer.step()
    assert measure(model, drafter, 0.0).accepted < 0.5
