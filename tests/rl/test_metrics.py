"""Flat metrics and their writers."""

from __future__ import annotations

import builtins

import pytest

from tests.engine.engines import greedy, tiny_engine
from tlt_engine.rl.metrics import PrometheusWriter, TensorBoardWriter, flat


def stats():
    engine = tiny_engine()
    engine.generate([[1, 2, 3]], greedy(5))
    return engine.stats()


def test_stats_become_numbers():
    values = flat(stats())
    assert values["emitted_tokens"] == 5 and values["pages/used"] == 0 and values["finished/length"] == 1
    assert all(type(v) is float for v in values.values())
    assert flat({"a": {"b": [1, True, None, "x"]}, "curve": [0] * 100}) == {"a/b/0": 1.0, "a/b/1": 1.0}


def test_prometheus_gauges():
    prometheus = pytest.importorskip("prometheus_client")
    one, two = PrometheusWriter(labels={"rank": "0"}), PrometheusWriter()
    for _ in range(2):
        one.write(flat(stats()))
    two.write({"pages/free": 3.0})
    assert one.registry.get_sample_value("tlt_emitted_tokens", {"rank": "0"}) == 5
    assert two.registry.get_sample_value("tlt_pages_free") == 3
    assert b"tlt_pages_used" in prometheus.generate_latest(one.registry)


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(str(tmp_path))
    for step in (1, 2):
        writer.write({"accept_length": float(step)}, step)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/accept_length")] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("make, package", [
    (PrometheusWriter, "prometheus"), (lambda: TensorBoardWriter("x"), "tensorboard"),
])
def test_a_missing_package_is_named(make, package, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("prometheus_client", "torch.utils.tensorboard")):
            raise ImportError(f"No module named {name}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        make()
