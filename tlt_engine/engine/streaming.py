"""The engine behind asyncio: one thread steps it while there is work, callers iterate over what comes.

Knows no scheduling and no tensors. The engine's own add_request, step and abort are this wrapper's while it is open;
generate, update_weights, pause_generation and the like may be called beside it, from any thread. Event loops never wait
for the engine: the thread takes requests in, and out, between steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
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
        self._streams: dict[str, _Stream] = {}  # by request id; changed by the thread alone
        self._wake = threading.Condition()  # guards the three below; held for moments only
        self._new: list[_Stream] = []
        self._left: list[_Stream] = []
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
        request |= {"prompt": prompt, "sampling_params": sampling_params, "stream": stream != "final"}
        listener = _Stream(asyncio.get_running_loop(), stream, request)
        with self._wake:
            if self._closed:
                raise _closed()
            self._new.append(listener)
            self._wake.notify_all()
        ended = False
        try:
            while not ended:
                item = await listener.queue.get()
                if isinstance(item, BaseException):
                    raise item
                output, ended = item
                yield output
        finally:
            with self._wake:
                self._left.append(listener)
                self._wake.notify_all()

    async def abort(self, request_id: str) -> None:
        """Its stream ends with what it has, finish_reason "abort"."""
        self._ended(await asyncio.to_thread(self.engine.abort, request_id))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._streams or self._new or self._left):
                    self._wake.wait()
                new, self._new = self._new, []
                left, self._left = self._left, []
                if self._closed:
                    break
            for stream in new:
                self._add(stream)
            self._drop(left)
            try:
                self._step()
            except EngineHalted:
                self._idle()
            except BaseException as error:
                failed = list(self._streams.values())
                for stream in failed:
                    stream.put(error)
                self._drop(failed)
        self._drop(left)
        self._ended(self.engine.abort(list(self._streams)))
        for stream in new:
            stream.put(_closed())

    def _add(self, stream: _Stream) -> None:
        try:
            stream.request_id = self.engine.add_request(**stream.request)
        except Exception as error:
            stream.put(error)
        else:
            self._streams[stream.request_id] = stream

    def _drop(self, streams: list[_Stream]) -> None:
        """Nobody waits for them any more."""
        for stream in streams:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
                self.engine.abort(stream.request_id)

    def _idle(self) -> None:
        """Until requests come or leave, or it is time to look again."""
        with self._wake:
            if not (self._closed or self._new or self._left):
                self._wake.wait(IDLE_S)

    def _step(self) -> None:
        steps = self.engine.steps
        self._ended(self.engine.step())
        if self._streams and self.engine.steps == steps:  # paused
            self._idle()
        for request_id, stream in list(self._streams.items()):
            if stream.kind != "final" and (output := self.engine.progress(request_id)) is not None:
                stream.grow(output)

    def _ended(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.end(output)


def _closed() -> RuntimeError:
    return RuntimeError("generate: expected an open AsyncRolloutEngine, got a closed one; build another")


class _Stream:
    """One caller's queue, filled from the stepping thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: Kind, request: dict[str, Any]) -> None:
        self.kind, self.request = kind, request
        self.request_id = ""  # until the engine has it
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = loop
        self._sent: dict[int, tuple[int, int]] = {}  # by sample: tokens, characters

    def put(self, item: object) -> None:
        with suppress(RuntimeError):  # its loop has been closed: nobody is left to read
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
