"""The forward pass against transformers' own, on tiny random models of every supported architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tlt_kernels.norm import rms_norm
from torch import Tensor

from tests.tiny import ARCHS, Runner, hf_logits, prefill_logits, tiny_config, tiny_hf_model, tiny_target
from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models import transformer
from tlt_engine.models.config import ModelConfig, default_aux_layers
from tlt_engine.models.loader import load_model
from tlt_engine.models.transformer import Transformer

FP32_BOUND = 1e-4  # logits have a spread of about 1; the differences seen are below 5e-6
IDS = [int(i) for i in torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))]


def difference(hf: Any, ids: list[int] = IDS, **load: Any) -> float:
    model = load_model(hf, **load).model
    return (prefill_logits(model, ids)[0].float() - hf_logits(hf, ids).float()).abs().max().item()


def greedy(model: Transformer, ids: list[int], count: int) -> list[int]:
    runner, out = Runner(model, length=len(ids) + count), list(ids)
    logits = runner.step({0: ids})[0][0]
    for _ in range(count):
        out.append(int(logits[-1].argmax()))
        logits = runner.step({0: out[-1:]})[0][0]
    return out[len(ids) :]


def hf_greedy(hf: Any, ids: list[int], count: int) -> list[int]:
    out = list(ids)
    for _ in range(count):
        out.append(int(hf_logits(hf, out)[-1].argmax()))
    return out[len(ids) :]


# F12: biases, q/k norms and the GQA ratio.


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (6, 2), (8, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_equal_transformers(arch: str, heads: tuple[int, int]) -> None:
    hf = tiny_hf_model(arch, hidden_size=48, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8)
    assert difference(hf) < FP32_BOUND


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_transformers(arch: str) -> None:
    hf = tiny_hf_model(arch, seed=3)
    assert greedy(load_model(hf).model, IDS[:8], 32) == hf_greedy(hf, IDS[:8], 32)


@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("arch", ARCHS)
def test_low_precision_stays_close(arch: str, dtype: torch.dtype, bound: float) -> None:
    """The error against fp32 (of the same rounded weights) is at most twice transformers' own, and the two differ by at
    most `bound` of the logits' spread (rms): 8 bits of mantissa give 4e-3 a rounding, 11 bits 5e-4."""
    hf = tiny_hf_model(arch, dtype=dtype)
    ours = prefill_logits(load_model(hf, dtype=dtype).model, IDS)[0].float()
    theirs = hf_logits(hf, IDS).float()
    exact = hf_logits(hf.float(), IDS)
    rms = lambda x: x.pow(2).mean().sqrt().item()  # noqa: E731
    assert rms(ours - theirs) < bound * rms(exact)
    assert rms(ours - exact) < 2 * rms(theirs - exact) + 1e-6


def test_llama_biases_of_all_projections() -> None:
    assert difference(tiny_hf_model("llama", attention_bias=True, mlp_bias=True)) < FP32_BOUND
    assert difference(tiny_hf_model("qwen3", attention_bias=True)) < FP32_BOUND


# F11: head_dim is its own number.


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_head_dim_other_than_hidden_over_heads(arch: str) -> None:
    hf = tiny_hf_model(arch, hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    shapes = {name: tuple(w.shape) for name, w in load_model(hf).model.named_weights()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 40)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (40, 64)
    assert difference(hf) < FP32_BOUND


# What a lost part of the architecture would do: each of these must break the parity that the tests above assert.


@pytest.mark.parametrize(
    "arch,part", [("qwen2", "qkv_bias"), ("qwen3", "q_norm"), ("llama", "input_norm"), ("mistral", "post_norm")]
)
def test_parity_check_sees_a_lost_part(arch: str, part: str) -> None:
    hf = tiny_hf_model(arch)
    model = load_model(hf).model
    weight = getattr(model.weights.layers[0], part)
    weight.fill_(0.0 if "bias" in part else 1.0)
    assert (prefill_logits(model, IDS)[0] - hf_logits(hf, IDS)).abs().max() > 100 * FP32_BOUND


def test_parity_check_sees_a_wrong_kv_head(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_hf_model("llama", num_attention_heads=4, num_key_value_heads=2)
    model = load_model(hf).model
    for name, weight in model.named_weights():
        if name.endswith("k_proj.weight"):
            weight.copy_(weight.roll(model.config.head_dim, 0))
    assert (prefill_logits(model, IDS)[0] - hf_logits(hf, IDS)).abs().max() > 100 * FP32_BOUND


# F17: hidden states are numbered as transformers' are.


def hf_hidden(hf: Any, ids: list[int]) -> list[Tensor]:
    """transformers' hidden_states, the last one replaced by the input of the final norm (its own is the output)."""
    seen: list[Tensor] = []
    hook = hf.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        states = hf(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    return [s[0] for s in states[:-1]] + [seen[0][0]]


@pytest.mark.parametrize("wanted", [(1, 2, 3), (4,), (0, 4), ()])
def test_captured_states_equal_hidden_states(wanted: tuple[int, ...]) -> None:
    hf = tiny_hf_model("llama", num_hidden_layers=4)
    _, hidden = prefill_logits(load_model(hf).model, IDS, capture=wanted)
    expected = hf_hidden(hf, IDS)
    assert set(hidden) == set(wanted)
    for index, state in hidden.items():
        torch.testing.assert_close(state, expected[index], rtol=0, atol=1e-5)
        others = [e for i, e in enumerate(expected) if i != index]
        assert all((state - other).abs().max().item() > 1e-2 for other in others), "an off-by-one would pass"


def test_last_captured_state_gives_the_logits() -> None:
    model = tiny_target("qwen3")
    logits, hidden = prefill_logits(model, IDS, capture=(2,))
    normed = rms_norm(hidden[2], model.weights.norm, model.config.rms_norm_eps)[0]
    torch.testing.assert_close(normed @ model.weights.head.T, logits, rtol=0, atol=1e-5)


def test_captured_states_can_be_trained_on() -> None:
    _, hidden = prefill_logits(tiny_target(), IDS, capture=(1,))
    weight = torch.zeros(32, 32, requires_grad=True)
    (hidden[1] @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("index", [-1, 3])
def test_capture_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"capture: expected hidden states in \[0, 2\]"):
        prefill_logits(tiny_target(), IDS, capture=(index,))


def test_default_aux_layers_are_valid_and_distinct() -> None:
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(4) == (1, 2, 3)
    for layers in range(2, 40):
        chosen = default_aux_layers(layers)
        assert len(set(chosen)) == 3 and list(chosen) == sorted(chosen) and chosen[0] >= 0 and chosen[2] <= layers
    with pytest.raises(ValueError, match="at least 2 layers"):
        default_aux_layers(1)


# Rows: only those asked for, and any split of the same tokens gives the same logits.


def test_logits_only_for_the_rows_asked_for() -> None:
    model = tiny_target()
    full = prefill_logits(model, IDS)[0]
    seen: list[Any] = []
    runner = Runner(model, length=len(IDS))
    forward = model.forward
    runner.model = lambda step, kv, capture: seen.append((step, kv)) or forward(step, kv, capture=capture)  # type: ignore[assignment]
    runner.step({0: IDS})
    step, kv = seen[0]
    for rows in ([], [3], [0, 7, 39]):
        part = type(step)(**{**step.__dict__, "logit_rows": torch.tensor(rows, dtype=torch.int64)})
        assert torch.equal(model(part, kv).logits, full[rows])


ODD_SIZES = {"hidden_size": 36, "head_dim": 10, "intermediate_size": 50}  # no multiple of a vector anywhere


def in_pieces(model: Transformer, ids: list[int], page_size: int, cuts: list[int]) -> Tensor:
    runner = Runner(model, page_size=page_size, length=len(ids))
    return torch.cat([runner.step({0: ids[a:b]})[0][0] for a, b in zip([0, *cuts], [*cuts, len(ids)])])


@pytest.mark.parametrize("sizes", [{}, ODD_SIZES], ids=["", "odd sizes"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("arch", ARCHS)
def test_chunks_and_rows_equal_one_prefill(arch: str, page_size: int, sizes: dict[str, Any]) -> None:
    """Bit for bit: in fp32 on the CPU a row's result depends on its own context only."""
    model = tiny_target(arch, **sizes)
    whole = in_pieces(model, IDS, page_size, [])
    assert torch.equal(in_pieces(model, IDS, page_size, [7, 8, 25]), whole)
    assert torch.equal(in_pieces(model, IDS, page_size, list(range(1, len(IDS)))), whole)


def test_equality_check_sees_products_that_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsteady(x: Tensor, w: Tensor, bias: Tensor | None = None, *, base: Any = 0, checked: bool = True) -> Tensor:
        half = x.shape[1] // 2 if len(x) > 1 else 0  # another order of summation for one row than for many
        product = x[:, :half] @ w[:, :half].T + x[:, half:] @ w[:, half:].T
        return base + (product if bias is None else product + bias)

    monkeypatch.setattr(transformer, "linear", unsteady)
    model = tiny_target("llama")
    by_row, whole = in_pieces(model, IDS, 4, list(range(1, len(IDS)))), in_pieces(model, IDS, 4, [])
    torch.testing.assert_close(by_row, whole, rtol=0, atol=FP32_BOUND)
    assert not torch.equal(by_row, whole)


TREE = [-1, 0, 0, 0, 1, 2, 2, 5, 4]  # three siblings below the root, then deeper


def path_to(node: int) -> list[int]:
    return [*path_to(TREE[node]), node] if node >= 0 else []


@pytest.mark.parametrize("arch", ARCHS)
def test_tree_rows_equal_their_root_path(arch: str) -> None:
    """Bit for bit. With a window of 8 the depth of a node counts, not its index."""
    tokens = IDS[20 : 20 + len(TREE)]
    extra: dict[str, Any] = {} if arch == "llama" else {"sliding_window": 8}
    if arch.startswith("qwen"):
        extra |= {"use_sliding_window": True, "max_window_layers": 0}
    model = tiny_target(arch, **extra)
    runner = Runner(model)
    runner.step({0: IDS[:20]})
    logits = runner.step({0: tokens}, parents={0: TREE})[0][0]
    for node in range(len(TREE)):
        path = [tokens[n] for n in path_to(node)]
        plain = prefill_logits(model, IDS[:20] + path)[0][-1]
        assert torch.equal(logits[node], plain)


def test_tree_check_sees_positions_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault F14 warns of: rope and window by a node's place in the row order."""
    model = tiny_target("mistral", sliding_window=8)
    tokens, runner = IDS[20 : 20 + len(TREE)], Runner(model)
    runner.step({0: IDS[:20]})
    forward = model.forward

    def flat(step: Any, kv: Any, capture: Any = ()) -> Any:
        return forward(type(step)(**{**step.__dict__, "positions": torch.arange(20, 20 + len(TREE))}), kv)

    runner.model = flat  # type: ignore[assignment]
    logits = runner.step({0: tokens}, parents={0: TREE})[0][0]
    plain = prefill_logits(model, IDS[:20] + [tokens[n] for n in path_to(7)])[0][-1]
    assert (logits[7] - plain).abs().max() > 100 * FP32_BOUND


def test_requests_of_one_step_do_not_mix() -> None:
    model = tiny_target("qwen3")
    runner = Runner(model, requests=3)
    runner.step({0: IDS[:5], 2: IDS[5:25]})
    mixed = runner.step({0: IDS[25:28], 1: IDS[:9], 2: IDS[30:33]}, parents={0: [-1, 0, 0]})[0]
    alone = Runner(model, requests=3)
    alone.step({0: IDS[:5]})
    alone.step({2: IDS[5:25]})
    for b, (ids, parents) in {0: (IDS[25:28], {0: [-1, 0, 0]}), 1: (IDS[:9], {}), 2: (IDS[30:33], {})}.items():
        assert torch.equal(mixed[b], alone.step({b: ids}, parents=parents)[0][b])


# F13: which layers have a window.


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "fields,windows",
    [
        ({"use_sliding_window": False}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (8, 8, 8, 8)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 8, 8)),
        ({"use_sliding_window": True, "max_window_layers": 4}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2}, (8, 0, 8, 0)),
    ],
    ids=["off", "all", "from 2", "none", "layer_types"],
)
def test_sliding_windows_of_qwen(arch: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    hf = tiny_hf_model(arch, num_hidden_layers=4, sliding_window=8, **fields)
    model = load_model(hf).model
    assert model.config.windows == windows
    assert difference(hf, IDS[:30]) < FP32_BOUND
    full = tiny_hf_model(arch, num_hidden_layers=4, use_sliding_window=False)
    assert torch.equal(hf_logits(hf, IDS[:30]), hf_logits(full, IDS[:30])) == (not any(windows))


def test_sliding_window_of_mistral() -> None:
    hf = tiny_hf_model("mistral", sliding_window=8)
    assert load_model(hf).model.config.windows == (8, 8)
    assert difference(hf, IDS[:30]) < FP32_BOUND
    assert (hf_logits(hf, IDS[:30]) - hf_logits(tiny_hf_model("mistral"), IDS[:30])).abs().max() > 1e-2


def test_window_is_never_read_where_the_architecture_has_none() -> None:
    config = {**tiny_config("llama").to_dict(), "sliding_window": 8, "use_sliding_window": True}
    assert ModelConfig.from_hf(config).windows == (0, 0)


# The head in another dtype.


@pytest.mark.parametrize("tie", [True, False])
def test_fp32_head_on_bf16_weights(tie: bool) -> None:
    """Its logits are the fp32 product of the bf16 hidden states and weights, also after an update."""
    model = tiny_target(dtype="bfloat16", lm_head_dtype="float32", tie_word_embeddings=tie)
    other = tiny_hf_model(seed=9, tie_word_embeddings=tie)
    for update in (False, True):
        if update:
            model.load_weights(other.state_dict())
        logits, hidden = prefill_logits(model, IDS, capture=(2,))
        weights = dict(model.named_weights())
        head = weights["model.embed_tokens.weight" if tie else "lm_head.weight"]
        normed = rms_norm(hidden[2], model.weights.norm, model.config.rms_norm_eps)[0]
        assert logits.dtype == torch.float32 and head.dtype == torch.bfloat16
        torch.testing.assert_close(logits, normed.float() @ head.float().T, rtol=0, atol=1e-5)


def test_head_of_the_same_dtype_is_not_copied() -> None:
    model = tiny_target(tie_word_embeddings=True, lm_head_dtype="float32")
    assert model.weights.head.data_ptr() == model.weights.embed.data_ptr()


# What is refused.


@pytest.mark.parametrize(
    "change,message",
    [
        ({"architectures": ["MixtralForCausalLM"]}, "one of LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads = 4"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**tiny_config("llama").to_dict(), **change})


def test_length_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len: expected an integer in \[1, 256\].*yarn"):
        tiny_target(max_model_len=257)
    assert tiny_target(max_model_len=256).max_model_len == 256


# Where K and V lie.


def test_kv_storage_layers_are_views_of_one_tensor() -> None:
    kv = KVStorage(3, 5, 4, 2, 8, torch.bfloat16, "cpu")
    assert (kv.num_pages, kv.page_size, kv.bytes) == (5, 4, 3 * 2 * 5 * 4 * 2 * 8 * 2)
    k, v = kv.layer(1)
    k.fill_(1)
    v.fill_(2)
    assert kv.data.shape == (3, 2, 5, 4, 2, 8)
    assert (kv.data[1, 0] == 1).all() and (kv.data[1, 1] == 2).all() and (kv.data[[0, 2]] == 0).all()
    with pytest.raises(ValueError, match="KVStorage: expected"):
        KVStorage(3, 0, 4, 2, 8, torch.float32, "cpu")


def test_pass_writes_its_own_slots_only() -> None:
    model = tiny_target()
    runner = Runner(model, requests=2, length=16)
    runner.step({1: IDS[:6]})
    keys = runner.kv.data[0, 0].reshape(-1, 2, 8)
    written = [i for i in range(len(keys)) if keys[i].abs().sum() > 0]
    assert written == list(range(16, 22))
