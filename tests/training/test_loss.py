"""The unrolled loss: equal to a token-by-token chain, to a plain formula, and blind to how sequences are packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.drafters import gradients, packed_texts, random_texts, tiny_drafter, tiny_target
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.transformer import Transformer
from tlt_engine.training import attention, loss
from tlt_engine.training.loss import LossConfig, Objective, Teacher
from tlt_engine.training.packing import PackedRows, pack

LENGTHS = (23, 2, 9, 1, 14)
SEVEN = {"num_hidden_layers": 7}


# ------------------------------------------------------------------ an independent chain


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """A head's vector turned, from the definition: the pair (i, i + D / 2) by position / theta^(2i/D)."""
    half = len(x) // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / len(x))
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x[:half], x[half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


class Chain:
    """One sequence, one token at a time, with a list of keys for a cache: what serving does, written from the names of
    the checkpoint and not from our module."""

    def __init__(self, model: EagleModel) -> None:
        self.w = dict(model.named_tensors())
        self.c = model.config
        self.embedding, self.head = model.embedding, model.head_weight
        self.target_norm = model.target.weights.norm
        self.cache: list[tuple[int, Tensor, Tensor]] = []  # position, keys [Hkv, D], values

    def entry(self, aux: Tensor | None, parent: Tensor | None, token: int, position: int) -> Tensor:
        c, w, eps = self.c, self.w, self.c.rms_norm_eps
        embed = self.embedding[token]
        if c.kind == "eagle1":
            hidden = parent if aux is None else rms(aux, self.target_norm, eps)
            x = residual = w["fc.weight"] @ torch.cat((embed, hidden))
            layer = "layers.0"
        else:
            hidden = parent if aux is None else w["fc.weight"] @ aux
            layer, residual = "midlayer", hidden
            x = torch.cat((rms(embed, w[f"{layer}.input_layernorm.weight"], eps),
                           rms(hidden, w[f"{layer}.hidden_norm.weight"], eps)))
        heads = {n: (w[f"{layer}.self_attn.{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in "qkv"}
        q, k = ([turned(h, position, c.rope.theta) for h in heads[n]] for n in "qk")
        self.cache.append((position, torch.stack(k), heads["v"]))
        seen = [e for e in self.cache if c.window is None or e[0] > position - c.window]
        out = []
        for i, query in enumerate(q):
            kv = i * c.num_kv_heads // c.num_heads
            scores = torch.stack([query @ keys[kv] for _, keys, _ in seen]) / c.head_dim**0.5
            out.append(scores.softmax(0) @ torch.stack([values[kv] for _, _, values in seen]))
        x = residual + w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(out)
        y = rms(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = (w[f"{layer}.mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
        return x + w[f"{layer}.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def logits(self, out: Tensor) -> Tensor:
        normed = rms(out, self.w["norm.weight"], self.c.rms_norm_eps) if "norm.weight" in self.w else out
        return self.head @ normed


@torch.no_grad()
def chains(model: EagleModel, ids: list[int], aux: Tensor, first: int, steps: int) -> dict[tuple[int, int], Tensor]:
    """(entry t, step s) -> output of the draft of depth s behind entry t, the drafts being the text's own tokens."""
    chain, outs = Chain(model), {}
    for t in range(len(ids) - 1):
        out = chain.entry(aux[t], None, ids[t + 1], first + t)
        outs[t, 0] = out
        kept = list(chain.cache)
        for s in range(1, steps):
            if t + s + 1 < len(ids):
                out = chain.entry(None, out, ids[t + s + 1], first + t + s)
                outs[t, s] = out
        chain.cache = kept  # rollback: the drafts' keys go, the entry's stays
    return outs


DRAFTERS: dict[str, dict[str, Any]] = {
    "window 512": {}, "window 5": {"window": 5}, "window 2": {"window": 2}, "window 1": {"window": 1},
    "no window": {"window": None}, "reduced": {"vocabulary": [3, 7, 8, 20, 33, 63]},
    "other heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
    "other width": {"hidden_size": 24, "vocabulary": list(range(0, 64, 2))}, "eagle1": {"kind": "eagle1", "window": 6},
}


@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_unroll_is_what_serving_computes_token_by_token(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, **DRAFTERS[name])
    texts, firsts = random_texts(LENGTHS), [0, 3, 40, 0, 7]
    packed = packed_texts(target, model, texts, firsts)
    assert differences(model, packed, texts, firsts) == []


def differences(model: EagleModel, packed: PackedRows, texts: list[list[int]], firsts: list[int]) -> list[str]:
    steps, found = 4, []
    with torch.no_grad():
        outs = Objective(model, LossConfig(steps=steps)).unroll(packed)
    chain, start = Chain(model), 0
    for ids, first in zip(texts, firsts):
        for (t, s), want in chains(model, ids, packed.aux[start : start + len(ids)], first, steps).items():
            got = outs[s][start + t]
            assert packed.trained(s)[start + t]
            apart = (got - want).abs().max().item()
            if apart > 1e-5 * max(1.0, want.abs().max().item()):
                found.append(f"entry {t} of {len(ids)}, step {s}: {apart}")
            if model.logits(got).argmax() != chain.logits(want).argmax():
                found.append(f"entry {t} of {len(ids)}, step {s}: argmax")
        start += len(ids)
    return found


def no_shift(monkeypatch: pytest.MonkeyPatch, packed: PackedRows, model: EagleModel) -> PackedRows:
    return replace(packed, tokens=packed.tokens.roll(1))


def same_positions(monkeypatch: pytest.MonkeyPatch, packed: PackedRows, model: EagleModel) -> PackedRows:
    return replace(packed, positions=packed.positions * 2)


def no_borders(monkeypatch: pytest.MonkeyPatch, packed: PackedRows, model: EagleModel) -> PackedRows:
    return replace(packed, starts=torch.zeros_like(packed.starts))


def normed_feedback(monkeypatch: pytest.MonkeyPatch, packed: PackedRows, model: EagleModel) -> PackedRows:
    finish = model.finish
    monkeypatch.setattr(model, "finish", lambda a, r: model.final(finish(a, r)))
    return packed


def no_own_keys(monkeypatch: pytest.MonkeyPatch, packed: PackedRows, model: EagleModel) -> PackedRows:
    """The draft's own keys are left out from step 2 on: only the last one is seen."""
    whole = loss.unroll_attention
    monkeypatch.setattr(
        loss, "unroll_attention", lambda q, kept, own, starts, **more: whole(q, kept, own[-1:], starts, **more)
    )
    return packed


@pytest.mark.parametrize("broken", [no_shift, same_positions, no_borders, normed_feedback, no_own_keys])
def test_sabotage_of_the_unroll_is_seen(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, window=8)
    texts, firsts = random_texts(LENGTHS), [0] * len(LENGTHS)
    packed = broken(monkeypatch, packed_texts(target, model, texts, firsts), model)
    assert differences(model, packed, texts, firsts) != []


# ------------------------------------------------------------------ the loss


def plain_loss(model: EagleModel, packed: PackedRows, config: LossConfig) -> Tensor:
    """The definition, with all logits at once and torch's own gradient."""
    objective = Objective(model, config)
    outs, total = objective.unroll(packed), torch.zeros(())
    weights = model.target.weights
    wide = packed.last
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + model.target.config.rms_norm_eps) * weights.norm
    logits = normed @ weights.head.T
    p = (logits if model.target_ids is None else logits[:, model.target_ids]).softmax(-1)
    for step, out in enumerate(outs):
        rows = [r for r in range(len(packed)) if packed.usable[r] and r + step + 1 <= int(packed.ends[r])]
        if rows:
            each = -(p[[r + step + 1 for r in rows]] * model.logits(out[rows]).log_softmax(-1)).sum(-1)
            total = total + config.decay**step * each.mean()
    return total


@pytest.mark.parametrize("chunk_elements", [1, 64 * 7, 2**26])
@pytest.mark.parametrize("name", ["window 512", "reduced", "other width", "eagle1"])
def test_loss_and_gradients_are_those_of_the_plain_formula(name: str, chunk_elements: int) -> None:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, **DRAFTERS[name])
    packed = packed_texts(target, model, random_texts(LENGTHS))
    config = LossConfig(steps=3, decay=0.7, chunk_elements=chunk_elements)
    want = plain_loss(model, packed, config)
    want.backward()
    expected = gradients(model)
    model.zero_grad()
    got, _ = Objective(model, config)(packed)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    found = gradients(model)
    assert set(found) == set(expected) == {n for n, _ in model.named_parameters()}
    for n in expected:
        torch.testing.assert_close(found[n], expected[n], rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("features", ["none", "l1", "smooth_l1"])
@pytest.mark.parametrize("name", ["window 5", "reduced", "eagle1"])
def test_packed_gradients_are_the_unpacked_ones(name: str, features: str) -> None:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, **DRAFTERS[name])
    objective = Objective(model, LossConfig(steps=3, features=features, feature_weight=0.5))
    apart = packing_error(target, model, objective)
    assert max(apart.values()) < 1e-6, apart


def packing_error(target: Transformer, model: EagleModel, objective: Objective, **change: Tensor) -> dict[str, float]:
    """Largest difference of each gradient, packed against one sequence at a time. `change` breaks the packed rows."""
    texts = random_texts(LENGTHS)
    packed = packed_texts(target, model, texts)
    counts = objective.counts(packed)
    model.zero_grad()
    total, _ = objective(replace(packed, **change) if change else packed)
    total.backward()
    together = gradients(model)
    model.zero_grad()
    for ids in texts:
        objective(packed_texts(target, model, [ids]), counts)[0].backward()
    return {n: float((g - together[n]).abs().max()) for n, g in gradients(model).items()}


def test_sabotage_attention_and_loss_across_borders_are_seen() -> None:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target)
    objective = Objective(model, LossConfig(steps=3))
    rows = sum(LENGTHS)
    assert max(packing_error(target, model, objective, starts=torch.zeros(rows, dtype=torch.int64)).values()) > 1e-4
    ends = torch.full((rows,), rows - 1)
    assert max(packing_error(target, model, objective, ends=ends).values()) > 1e-4


def copy_drafter(target: Transformer, kind: str) -> EagleModel:
    """A drafter that computes what memoryless_target(kind) computes. eagle3: a window of one entry, values that carry
    the embedding, and the target's own last feed-forward layer; its residual stream is the hidden input, so it is a
    copy at step 0 only. eagle1: the embedding behind the final norm, at every step."""
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    model = EagleModel(EagleConfig.for_target(target.config, kind=kind, window=1, **sizes)).bind(target)
    weights = target.weights
    with torch.no_grad():
        if model.norm is None:
            model.fc[:, :32] = weights.norm.diag()
            return model
        model.qkv[64:96, :32] = torch.eye(32)
        model.o.copy_(torch.eye(32))
        model.post_norm.copy_(weights.layers[1].post_norm)
        model.gate_up.copy_(weights.layers[1].gate_up)
        model.down.copy_(weights.layers[1].down)
        model.norm.copy_(weights.norm)
    return model


def memoryless_target(kind: str) -> Transformer:
    """Two layers without attention, whose law depends on the last token alone: through a feed-forward layer, or for
    eagle1 through the final norm only. Embeddings of root mean square 1, so that a norm of weight 1 leaves them."""
    target = tiny_target(num_key_value_heads=4, rms_norm_eps=1e-12)
    with torch.no_grad():
        w = target.weights
        w.embed.div_(w.embed.pow(2).mean(-1, keepdim=True).sqrt())
        for layer in w.layers:
            layer.o.zero_()
        for layer in w.layers if kind == "eagle1" else w.layers[:1]:
            layer.down.zero_()
    return target


COPIES = [("eagle3", 1), ("eagle1", 4)]


@pytest.mark.parametrize(("kind", "steps"), COPIES)
@torch.no_grad()
def test_a_copy_of_the_target_has_the_teachers_entropy_for_its_loss(kind: str, steps: int) -> None:
    """J03: any shift of inputs, targets or mask would leave a divergence."""
    target = memoryless_target(kind)
    model = copy_drafter(target, kind)
    packed = packed_texts(target, model, random_texts(LENGTHS))
    value, sums = Objective(model, LossConfig(steps=steps, decay=0.8))(packed)
    means = sums.means()
    entropy = means["entropy"]
    assert min(entropy) > 1.0
    for got, want in zip(means["cross_entropy"], entropy):
        assert abs(got - want) < 1e-5
    assert value.item() == pytest.approx(sum(0.8**s * h for s, h in enumerate(entropy)), abs=1e-5)
    assert means["agreement"] == [1.0] * steps
    assert min(means["overlap"]) > 1 - 1e-5
    assert sums.rows.tolist() == [sum(max(n - 1 - s, 0) for n in LENGTHS) for s in range(steps)]


@pytest.mark.parametrize(("kind", "steps"), COPIES)
@torch.no_grad()
def test_sabotage_a_shifted_copy_has_a_divergence(kind: str, steps: int) -> None:
    target = memoryless_target(kind)
    model = copy_drafter(target, kind)
    packed = packed_texts(target, model, random_texts(LENGTHS))
    for broken in (replace(packed, tokens=packed.tokens.roll(-1)), replace(packed, last=packed.last.roll(1, 0))):
        means = Objective(model, LossConfig(steps=steps))(broken)[1].means()
        assert min(c - h for c, h in zip(means["cross_entropy"], means["entropy"])) > 0.1


def test_the_masked_share_is_the_targets_mass_outside_the_draft_vocabulary() -> None:
    target = tiny_target(**SEVEN)
    ids = [3, 7, 8, 20, 33, 63]
    model = tiny_drafter(target, vocabulary=ids)
    packed = packed_texts(target, model, random_texts([20]))
    with torch.no_grad():
        rows = Teacher.of(model)(packed.last)
        logits = Teacher.of(model).normed(packed.last) @ target.weights.head.T
    whole = logits.softmax(-1)
    torch.testing.assert_close(rows.masked, 1 - whole[:, ids].sum(-1), rtol=0, atol=1e-6)
    p = (rows.logits - rows.norm[:, None]).exp()
    torch.testing.assert_close(p, whole[:, ids] / whole[:, ids].sum(-1, keepdim=True), rtol=0, atol=1e-6)
    assert rows.best.tolist() == logits.argmax(-1).tolist()
    with torch.no_grad():
        means = Objective(model, LossConfig(steps=1))(packed)[1].means()
    assert means["masked"][0] == pytest.approx(rows.masked[1:].mean().item(), abs=1e-6)


@pytest.mark.parametrize("case", ["no usable row", "single tokens", "no row at all for some steps"])
def test_without_a_trained_row_the_loss_is_zero_and_gradients_finite(case: str) -> None:
    """J04"""
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target)
    texts = random_texts([1, 1, 1] if case == "single tokens" else [3, 2])
    packed = packed_texts(target, model, texts)
    if case == "no usable row":
        packed = replace(packed, usable=torch.zeros(len(packed), dtype=torch.bool))
    value, sums = Objective(model, LossConfig(steps=4))(packed)
    value.backward()
    grads = gradients(model)
    assert all(g.isfinite().all() for g in grads.values())
    if case == "no row at all for some steps":
        assert sums.rows.tolist() == [3, 1, 0, 0] and value.item() > 0
    else:
        assert value.item() == 0 and all(g.abs().max() == 0 for g in grads.values())


def test_pack_refuses_rows_that_do_not_match_their_tokens() -> None:
    with pytest.raises(ValueError, match="as many hidden rows as tokens"):
        pack([torch.arange(34)], torch.zeros(33, 8), torch.zeros(33, 4), [0])


def test_context_is_attended_to_and_not_trained() -> None:
    """A fork's prompt: its own rows see it, and the loss is theirs alone."""
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target)
    (ids,) = random_texts([20])
    whole = packed_texts(target, model, [ids])
    part = pack([whole.tokens], whole.aux, whole.last, [0], [12])
    assert part.trained(1).nonzero()[:, 0].tolist() == list(range(12, 18))
    objective = Objective(model, LossConfig(steps=2))
    with torch.no_grad():
        outs = objective.unroll(whole)
        _, sums = objective(part)
        teacher = Teacher.of(model)(whole.last)
        log_p = teacher.logits - teacher.norm[:, None]
    assert sums.rows.tolist() == [7, 6]
    for step, out in enumerate(outs):
        rows = torch.arange(12, 19 - step)
        want = -(log_p[rows + step + 1].exp() * model.logits(out[rows]).log_softmax(-1)).sum()
        assert sums.cross_entropy[step].item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize(("features", "kind"), [("l1", "eagle3"), ("smooth_l1", "eagle1")])
def test_the_feature_loss_compares_with_the_state_that_the_output_stands_in_for(features: str, kind: str) -> None:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, kind=kind)
    packed = packed_texts(target, model, random_texts([9, 5]))
    config = LossConfig(steps=2, decay=0.5, features=features, feature_weight=3.0)
    with torch.no_grad():
        total, sums = Objective(model, config)(packed)
        without, _ = Objective(model, replace(config, features="none"))(packed)
        outs = Objective(model, config).unroll(packed)
    goal = Teacher.of(model).normed(packed.last) if kind == "eagle1" else packed.last
    added = 0.0
    for step, out in enumerate(outs):
        rows = packed.trained(step).nonzero()[:, 0]
        apart = (out[rows] - goal[rows + step + 1]).abs()
        each = apart if features == "l1" else torch.where(apart < 1, apart**2 / 2, apart - 0.5)
        assert sums.feature[step].item() == pytest.approx(each.mean(-1).sum().item(), rel=1e-5)
        added += 0.5**step * each.mean().item()
    assert (total - without).item() == pytest.approx(3.0 * added, rel=1e-4)


def test_positions_start_again_with_every_sequence() -> None:
    packed = pack([torch.arange(3), torch.arange(2)], torch.zeros(5, 8), torch.zeros(5, 4), [0, 9])
    assert packed.positions.tolist() == [0, 1, 2, 9, 10]
    assert packed.starts.tolist() == [0, 0, 0, 3, 3] and packed.ends.tolist() == [2, 2, 2, 4, 4]
    assert packed.longest == 3 and packed.trained(0).tolist() == [True, True, False, True, False]


def as_the_last_layer(target: Transformer, **drafter: Any) -> tuple[Tensor, Tensor]:
    """(logits of a drafter that started from its target, the target's): without the draws that are left, and reading
    the input of the target's last layer."""
    model = tiny_drafter(target, aux_layers=(0, 1, 2), window=None, **drafter)
    model.start_from_target()
    with torch.no_grad():
        model.fc[:, :-32] = 0
        model.fc[:, -32:] = torch.eye(32)
        model.qkv[:, :32] = 0
        model.down[:, target.config.intermediate_size :] = 0
    packed = packed_texts(target, model, random_texts(LENGTHS))
    with torch.no_grad():
        (out,) = Objective(model, LossConfig(steps=1)).unroll(packed)
        return model.logits(out), Teacher.of(model).normed(packed.last) @ target.weights.head.T


def test_a_drafter_that_starts_from_its_target_is_its_last_layer() -> None:
    target = tiny_target(num_hidden_layers=3)
    torch.testing.assert_close(*as_the_last_layer(target), rtol=1e-4, atol=1e-4)
    wider = as_the_last_layer(target, intermediate_size=target.config.intermediate_size + 8)
    torch.testing.assert_close(*wider, rtol=1e-4, atol=1e-4)


def test_sabotage_another_layer_of_the_target_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(num_hidden_layers=3)
    real = EagleModel.start_from_target

    def first_layer(model: EagleModel) -> None:
        model.target.weights.layers.reverse()
        real(model)
        model.target.weights.layers.reverse()

    monkeypatch.setattr(EagleModel, "start_from_target", first_layer)
    ours, theirs = as_the_last_layer(target)
    assert (ours - theirs).abs().max() > 0.01


def test_starting_from_the_target_takes_what_fits() -> None:
    target = tiny_target(**SEVEN)
    narrow = tiny_drafter(target, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    narrow.start_from_target()
    assert torch.equal(narrow.down, target.weights.layers[-1].down[:, :16])
    with pytest.raises(ValueError, match="eagle3"):
        tiny_drafter(target, kind="eagle1").start_from_target()
