"""Seeds and keys: who draws which noise. The identity is written down in docs/seeds.md; nothing here is random.

A draw's identity is (prompt ids, seed, sample index, segment, position, token id). Prompt and seed are hashed into the
64-bit Philox key here; the rest are counter words (csrc/philox.h).
"""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def check_seed(seed: object, name: str = "seed") -> int:
    """`seed` as a Python int in int64's range. Accepts anything with __index__ (numpy integers too), refuses bools and
    floats; never truncates."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ValueError(f"{name}: expected an integer, got {type(seed).__name__} {seed!r}; pass an int")
    value = operator.index(seed)
    if not INT64_MIN <= value <= INT64_MAX:
        raise ValueError(f"{name}: expected an int64 in [-2**63, 2**63), got {value}; reduce it, e.g. with derive_seed")
    return value


def _first64(data: bytes) -> int:
    return int.from_bytes(blake2b(data).digest()[:8], "little", signed=True)


def noise_key(seed: int, prompt_ids: Sequence[int]) -> int:
    """The Philox key, as a signed 64-bit pattern: first 64 bits of BLAKE2b over seed and prompt ids, each int64
    little-endian. `prior_output_ids` belong to prompt_ids here."""
    data = array("q", [seed])
    data.extend(prompt_ids)
    return _first64(data.tobytes())


def derive_seed(run_seed: int, step: int, prompt_uid: int | str) -> int:
    """A fresh int64 seed for one prompt of one RL step: a function of the caller's data alone, so it does not depend on
    rank, batch order or worker count. Never use seed + i: neighbours would share keys for equal prompts."""
    uid = str(prompt_uid).encode()
    head = array("q", [check_seed(run_seed, "run_seed"), check_seed(step, "step")]).tobytes()
    return _first64(b"tlt.derive_seed" + head + uid)


class KeyStream:
    """The engine's own stream of keys for requests without a seed. OS entropy unless a seed is given."""

    def __init__(self, seed: int | None = None) -> None:
        self._root = os.urandom(16) if seed is None else array("q", [check_seed(seed)]).tobytes()
        self._count = 0

    def next(self) -> int:
        self._count += 1
        return _first64(b"tlt.key_stream" + self._root + self._count.to_bytes(8, "little"))
