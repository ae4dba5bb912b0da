"""Norm, gated activation and rope on the CPU: references against transformers, kernels under the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tlt_kernels.activation
import tlt_kernels.norm
import tlt_kernels.rope
import torch
from torch import Tensor

from tests.kernels.elementwise_cases import rope_case

# The references are what transformers is compared with; test_elementwise_cpp.py compares the C++ path with them.
silu_mul = partial(tlt_kernels.activation.silu_mul, backend="reference")
rms_norm = partial(tlt_kernels.norm.rms_norm, backend="reference")
rope_write_kv = partial(tlt_kernels.rope.rope_write_kv, backend="reference")
HALF_TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    module = Qwen2RMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(module.weight)
    x, residual = torch.randn(2, 5, 96).to(dtype)
    y, h = rms_norm(x, module.weight.detach(), 1e-6, residual=residual)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, module(x + residual))
    assert torch.equal(rms_norm(x, module.weight.detach(), 1e-6)[0], module(x))
    assert not torch.equal(rms_norm(x, module.weight.detach(), 1e-1)[0], module(x))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_activation_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    from transformers.activations import ACT2FN

    gate_up = torch.randn(4, 26).to(dtype)
    gate, up = gate_up[:, :13], gate_up[:, 13:]
    assert torch.equal(silu_mul(gate_up), ACT2FN["silu"](gate) * up)
    assert not torch.equal(silu_mul(gate_up), ACT2FN["silu"](up) * gate)


def hf_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    unsigned = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), -1)
    return apply_rotary_pos_emb(q, k, cos, unsigned)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_rope_has_the_bits_of_transformers(dtype: torch.dtype, norm: bool) -> None:
    case = rope_case(6, 3, 1, 32, 32, norm=norm, dtype=dtype)
    before = case.kv.clone()
    got = rope_write_kv(*case.args(), q_norm=case.q_norm, k_norm=case.k_norm)
    q, k, v = case.qkv.view(6, 5, 32).split((3, 1, 1), 1)
    if case.q_norm is not None and case.k_norm is not None:
        q = rms_norm(q.reshape(-1, 32).contiguous(), case.q_norm, 1e-6)[0].view(6, 3, 32)
        k = rms_norm(k.reshape(-1, 32).contiguous(), case.k_norm, 1e-6)[0].view(6, 1, 32)
    c, s = case.cos[case.positions].to(dtype), case.sin[case.positions].to(dtype)
    wanted_q, wanted_k = hf_rope(q, k, c, s)
    assert torch.equal(got, wanted_q)
    before[0, case.slots // 16, case.slots % 16] = wanted_k
    before[1, case.slots // 16, case.slots % 16] = v
    assert torch.equal(case.kv, before)


def test_partial_rotation_passes_the_rest_through() -> None:
    case = rope_case(6, 3, 1, 32, 8)
    got = rope_write_kv(*case.args())
    q = case.qkv.view(6, 5, 32)[:, :3]
    assert torch.equal(got[..., 8:], q[..., 8:]) and not torch.equal(got[..., :8], q[..., :8])


def test_given_outputs_are_written() -> None:
    x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    wanted = rms_norm(x, weight, 1e-5, residual=residual)
    out = torch.empty_like(x)
    got = rms_norm(x, weight, 1e-5, residual=residual, out=out, residual_out=residual)
    assert got[0] is out and got[1] is residual
    assert torch.equal(out, wanted[0]) and torch.equal(residual, wanted[1])
    half = torch.empty(4, 8)
    assert silu_mul(x, out=half) is half and torch.equal(half, silu_mul(x))
    case = rope_case(6, 3, 1, 32, 8)
    q = torch.empty(6, 3, 32)
    assert rope_write_kv(*case.args(), q) is q and torch.equal(q, rope_write_kv(*case.args()))


CASE = rope_case(6, 3, 1, 32, 8)
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: rms_norm(torch.randn(4, 16), torch.ones(15), 1e-5), r"weight: expected float32 \[H=16\]"),
    (lambda: rms_norm(torch.randn(4, 16), torch.ones(16).half(), 1e-5), "weight: expected float32"),
    (lambda: rms_norm(torch.randn(16, 4).T, torch.ones(16), 1e-5), "x: expected contiguous"),
    (lambda: rms_norm(torch.randn(4, 16), torch.ones(16), 1e-5, residual_out=torch.randn(4, 16)), "residual_out"),
    (lambda: silu_mul(torch.randn(4, 15)), "even number of columns"),
    (lambda: silu_mul(torch.randn(4, 16), out=torch.randn(4, 16)), r"out: expected float32 \[R=4, I=8\]"),
    (lambda: rope_write_kv(CASE.qkv[:, :-1].contiguous(), *CASE.args()[1:]), "different models"),
    (lambda: rope_write_kv(*CASE.args()[:4], CASE.slots.int(), *CASE.args()[5:]), "slots: expected int64"),
    (lambda: rope_write_kv(*CASE.args(), q_norm=torch.ones(32)), "q_norm, k_norm: expected both"),
    (lambda: rope_write_kv(*CASE.args()[:-1], CASE.kv[1].double()), "v_cache: expected float32"),
    (lambda: rms_norm(torch.randn(4, 16), torch.ones(16), 1e-5, backend="triton"), "TRITON_INTERPRET"),
    (lambda: silu_mul(torch.randn(4, 16), backend="cuda"), "expected one of"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_arguments_are_refused(
    call: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        call()


def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    ran = interpreted("elementwise_interpreted.py")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


def interpreted(name: str) -> SimpleNamespace:
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command, env=clean | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280,
        cwd=tests.parents[2],
    )
    return SimpleNamespace(returncode=ran.returncode, stdout=ran.stdout, stderr=ran.stderr)
