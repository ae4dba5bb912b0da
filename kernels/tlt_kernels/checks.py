"""Argument checks of the ops: one form of error (name, expected, got, remedy), always ValueError.

Knows tensors, not ops. A shape may name its sizes, `shape={"B": 4, "V": 8}`; then the error names them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_CASTS = {
    torch.int32: ".int()", torch.int64: ".long()", torch.float32: ".float()", torch.bfloat16: ".bfloat16()",
    torch.float16: ".half()", torch.uint8: ".to(torch.uint8)", torch.bool: ".bool()",
}
Shape = Mapping[str, int | None] | Iterable[int | None]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(shape: Shape) -> list[tuple[str | None, int | None]]:
    if isinstance(shape, Mapping):
        return list(shape.items())
    return [(None, size) for size in shape]


def _shape_name(shape: Shape) -> str:
    parts = []
    for name, size in _sizes(shape):
        value = "any" if size is None else str(size)
        parts.append(value if name is None else name if size is None else f"{name}={value}")
    return f"[{', '.join(parts)}]"


def _passes(
    tensor: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...] | None, shape: Shape | None,
    device: torch.device | None, contiguous: bool,
) -> bool:
    """All of `check`'s conditions, without the words: a pass of 30 layers makes 720 checks, which took 8 ms when
    each built its message first."""
    if not isinstance(tensor, Tensor):
        return False
    if dtype is not None and tensor.dtype is not dtype and (type(dtype) is not tuple or tensor.dtype not in dtype):
        return False
    if shape is not None:
        sizes = tuple(shape.values() if isinstance(shape, dict) else shape)
        actual = tensor.shape
        if sizes != actual:
            if len(sizes) != len(actual):
                return False
            for size, got in zip(sizes, actual):
                if size is not None and size != got:
                    return False
    return (device is None or tensor.device == device) and (not contiguous or tensor.is_contiguous())


def check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    shape: Shape | None = None,
    device: torch.device | None = None,
    contiguous: bool = True,
) -> Tensor:
    """Returns `tensor`, or raises ValueError, e.g.
    `draft_tokens: expected int32 [B=4, V=8], got int64 [4, 8]; cast with .int()`.

    dtype: one, or several that will do. shape: sizes in order, or {name: size}; None = any size. device: the
    device that the op's other tensors are on. contiguous: row-major without gaps; the kernels take raw addresses.
    """
    if _passes(tensor, dtype, shape, device, contiguous):
        return tensor
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}; use torch.tensor(...)")
    dtypes = () if dtype is None else (dtype if isinstance(dtype, tuple) else (dtype,))
    expected = "/".join(dtype_name(d) for d in dtypes) or "a tensor"
    if shape is not None:
        expected += f" {_shape_name(shape)}"
    got = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    if dtypes and tensor.dtype not in dtypes:
        cast = _CASTS.get(dtypes[0], f".to(torch.{dtype_name(dtypes[0])})")
        raise ValueError(f"{name}: expected {expected}, got {got}; cast with {cast}")
    if shape is not None:
        sizes = [size for _, size in _sizes(shape)]
        if len(sizes) != tensor.dim() or any(s is not None and s != t for s, t in zip(sizes, tensor.shape)):
            raise ValueError(f"{name}: expected {expected}, got {got}; reshape or slice it to that shape")
    if device is not None and tensor.device != device:
        raise ValueError(
            f"{name}: expected {expected} on {device}, got it on {tensor.device}; move it with .to('{device}')"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {expected}, got strides {list(tensor.stride())}; call .contiguous() "
            "once, outside the loop"
        )
    return tensor


def check_range(name: str, tensor: Tensor, low: int | float, high: int | float) -> Tensor:
    """Returns `tensor` if every value lies in [low, high]; NaN does not. Reads the values: on CUDA this waits for
    the device, so call it on CPU tensors only."""
    if tensor.numel():
        bad = ~((tensor >= low) & (tensor <= high))
        if bool(bad.any()):
            where = int(bad.flatten().nonzero()[0])
            value = tensor.flatten()[where].item()
            raise ValueError(
                f"{name}: expected values in [{low}, {high}], got {value} at flat index {where}; fix the caller"
            )
    return tensor
