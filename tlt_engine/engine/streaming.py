"""The engine behind asyncio: one thread steps it while there is work, callers iterate over what comes.

Knows no scheduling and no tensors. The engine's own add_request and step are this wrapper's while it is open; generate,
update_weights, pause_generation and the like may be called beside it, from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

from tlt_engine.config import SamplingParams, refuse
from tlt_engine.engine.engine import RolloutEngine
from tlt_engine.engine.prompts import Prompt
from tlt_engine.engine.resident import EngineHalted
from tlt_engine.outputs import CompletionOutput, RequestOutput, WeightSpan

Kind = Literal["cumulative", "delta", "final"]
IDLE_S = 0.05  # how soon a halted engine is looked at again; work that arrives wakes the thread at once


class AsyncRolloutEngine:
    """engine: an engine that nobody else steps. `async with AsyncRolloutEngine(engine) as rollouts: ...` closes it; the
    engine stays usable."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._streams: dict[str, _Stream] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tlt-engine-steps", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncRolloutEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Abort what is in flight and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, stream: Kind = "cumulative",
        **request: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt as they grow; the last one has finished True (or a paused sample).

        stream: "cumulative", all so far each time; "delta", only what is new (ids, log-probabilities, text, spans with
        positions in the whole); "final", one output at the end. Leaving the loop early aborts the request.
        request: further arguments of RolloutEngine.add_request. Bad input raises ValueError at the first iteration.
        """
        if stream not in ("cumulative", "delta", "final"):
            raise refuse("stream", "'cumulative', 'delta' or 'final'", stream, "pick one")
        if self._closed:
            raise RuntimeError("generate: expected an open AsyncRolloutEngine, got a closed one; build another")
        listener = _Stream(asyncio.get_running_loop(), stream)
        with self._wake:  # the thread cannot end the request before the stream is known
            request_id = self.engine.add_request(prompt, sampling_params, stream=stream != "final", **request)
            self._streams[request_id] = listener
            self._wake.notify_all()
        ended = False
        try:
            while not ended:
                item = await listener.queue.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                output, ended = item
                yield output
        finally:
            self._streams.pop(request_id, None)
            if not ended:
                self.engine.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Its stream ends with what it has, finish_reason "abort"."""
        self._ended(await asyncio.to_thread(self.engine.abort, request_id))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not self._streams:
                    self._wake.wait()
                if self._closed:
                    break
            try:
                self._step()
            except EngineHalted:
                with self._wake:
                    self._wake.wait(IDLE_S)
            except BaseException as error:
                for stream in list(self._streams.values()):
                    stream.put(error)
                self._streams.clear()
        self._ended(self.engine.abort(list(self._streams)))

    def _step(self) -> None:
        steps = self.engine.steps
        self._ended(self.engine.step())
        if self.engine.steps == steps:  # paused
            with self._wake:
                self._wake.wait(IDLE_S)
        for request_id, stream in list(self._streams.items()):
            if stream.kind != "final" and (output := self.engine.progress(request_id)) is not None:
                stream.grow(output)

    def _ended(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.end(output)


class _Stream:
    """One caller's queue, filled from the stepping thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: Kind) -> None:
        self.kind = kind
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = loop
        self._sent: dict[int, tuple[int, int]] = {}  # by sample: tokens, characters

    def put(self, item: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)

    def grow(self, output: RequestOutput) -> None:
        if any(len(s.token_ids) > self._sent.get(s.index, (0, 0))[0] for s in output.outputs):
            self.put((self._shaped(output), False))

    def end(self, output: RequestOutput) -> None:
        self.put((self._shaped(output), True))

    def _shaped(self, output: RequestOutput) -> RequestOutput:
        shaped = [self._new_part(s) if self.kind == "delta" else s for s in output.outputs]
        self._sent = {s.index: (len(s.token_ids), len(s.text)) for s in output.outputs}
        return replace(output, outputs=shaped)

    def _new_part(self, sample: CompletionOutput) -> CompletionOutput:
        start, shown = self._sent.get(sample.index, (0, 0))
        return replace(
            sample, text=sample.text[shown:], token_ids=sample.token_ids[start:],
            sampled_logprobs=sample.sampled_logprobs[start:],
            raw_logprobs=None if sample.raw_logprobs is None else sample.raw_logprobs[start:],
            logprobs=None if sample.logprobs is None else sample.logprobs[start:],
            weight_versions=[WeightSpan(v, max(a, start), b) for v, a, b in sample.weight_versions if b > start],
        )
