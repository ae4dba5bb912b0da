"""The engine's counts as flat numbers, and two optional writers. Knows neither engines nor trainers: dicts in.

    values = flat(engine.stats())
    TensorBoardWriter("runs/1").write(values, step)      # needs tensorboard
    PrometheusWriter().write(values)                     # needs prometheus-client
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tlt_engine.config import refuse


def flat(stats: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """{"pages/free": 12.0, ...}: nested mappings joined by "/", a list as its entries "name/0", ..., bools as 0 and 1;
    texts, None and curves (lists of more than 64) are left out."""
    values: dict[str, float] = {}
    for key, value in stats.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            values |= flat(value, f"{name}/")
        elif isinstance(value, (list, tuple)) and len(value) <= 64:
            values |= flat({str(i): v for i, v in enumerate(value)}, f"{name}/")
        elif isinstance(value, (int, float)):
            values[name] = float(value)
    return values


class TensorBoardWriter:
    """folder: where event files go. prefix stands before every name."""

    def __init__(self, folder: str, prefix: str = "rollout/") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise refuse("tensorboard", "the package tensorboard", str(error), "pip install tensorboard") from error
        self._writer, self._prefix = SummaryWriter(folder), prefix

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(self._prefix + name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class PrometheusWriter:
    """A gauge a name, made at its first value. registry: a prometheus_client CollectorRegistry of its own by default,
    so that two engines in one process do not collide; serve it with prometheus_client.start_http_server(port,
    registry=writer.registry). labels: on every gauge, such as {"rank": "0"}."""

    def __init__(
        self, prefix: str = "tlt_", *, registry: Any = None, labels: Mapping[str, str] | None = None
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            remedy = "pip install prometheus-client"
            raise refuse("prometheus_client", "the package prometheus-client", str(error), remedy) from error
        self._gauge = prometheus_client.Gauge
        self.registry = registry if registry is not None else prometheus_client.CollectorRegistry()
        self._prefix, self._labels = prefix, dict(labels or {})
        self._gauges: dict[str, Any] = {}

    def write(self, values: Mapping[str, float], step: int | None = None) -> None:
        """step: ignored; Prometheus keeps its own time."""
        for name, value in values.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                metric = self._prefix + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                gauge = self._gauges[name] = self._gauge(
                    metric, name, labelnames=tuple(self._labels), registry=self.registry
                )
            (gauge.labels(**self._labels) if self._labels else gauge).set(value)
