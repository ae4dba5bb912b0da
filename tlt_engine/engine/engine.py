"""RolloutEngine: what an external RL loop calls. The work of a step is in core.py.

Nothing global is touched: not the caller's RNG, grad mode, default device or process group.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import EngineConfig, SamplingParams, refuse
from tlt_engine.engine.build import build_drafter, build_kv, build_model, build_runner, check_drafter
from tlt_engine.engine.core import EngineCore
from tlt_engine.engine.intake import Intake
from tlt_engine.engine.prompts import Prompt, as_list, as_prompt_list, check_ids, params_for_each
from tlt_engine.engine.resident import Resident
from tlt_engine.engine.sample import Request, Sample
from tlt_engine.engine.stops import Stop
from tlt_engine.engine.watchdog import Watchdog
from tlt_engine.models import EagleModel
from tlt_engine.outputs import RequestOutput, SpecCounts
from tlt_engine.scheduler.scheduler import Scheduler
from tlt_engine.speculation.drafter import Drafter
from tlt_engine.speculation.hidden import HiddenRecorder
from tlt_engine.speculation.learned import EagleDrafter

LOOK_AGAIN_S = 0.1  # at a halted engine: weights shared with another one become whole there, which nobody tells us


class RolloutEngine(Resident):
    """model: a Hugging Face folder, an in-memory transformers model (weights are copied), or a LoadedModel.
    tokenizer: overrides the one found beside the model. drafter: with SpeculationConfig(method="learned") an
    EagleModel, which is copied, or a drafter's folder; with method="custom" a Drafter.

    Thread-safe: calls from several threads interleave step by step. Bad input raises ValueError before anything
    changes, and leaves the engine and its other requests unharmed.

    Engines built on one LoadedModel share its weights: an update through one of them, or through model.load_weights, is
    noticed by the others at their next step and handled as if it were their own. It must not run while another thread
    is inside a step of one of them."""

    @torch.inference_mode(False)  # tensors of an inference mode could not be updated outside of it
    @torch.no_grad()
    def __init__(
        self, model: Any, config: EngineConfig | None = None, *, tokenizer: Any = None,
        drafter: Drafter | EagleModel | str | Path | None = None,
    ) -> None:
        super().__init__()
        self.config = config if config is not None else EngineConfig()
        if not isinstance(self.config, EngineConfig):
            raise refuse("config", "an EngineConfig", type(config).__name__, "build one")
        spec = self.config.speculation
        check_drafter(spec.method, drafter)
        loaded = build_model(model, self.config)
        self.model, self.model_config = loaded.model, loaded.config
        self.tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
        self.eos_ids = frozenset(loaded.eos_ids)
        self.max_model_len = self.config.max_model_len or self.model.max_model_len
        self.vocab_limit = self._find_vocab_limit()
        self._pool, self._prefix, kv = build_kv(self.config, self.model, self.max_model_len)
        scheduler = Scheduler(
            self._pool, self._prefix, page_size=self.config.page_size, max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens, max_model_len=self.max_model_len,
        )
        runner = build_runner(
            self.config, self.model, kv, self.max_model_len, vocab_limit=self.vocab_limit, eos_ids=self.eos_ids
        )
        own = build_drafter(
            self.config, drafter, self.model, self.max_model_len, eos_ids=sorted(self.eos_ids),
            vocab_limit=self.vocab_limit,
        )
        if isinstance(own, EagleDrafter):
            runner.draft_on_device(own)
        self._core = EngineCore(scheduler, runner, own, spec, self._on_end)
        self._intake = Intake(
            vocab_size=self.model_config.vocab_size, max_model_len=self.max_model_len, tokenizer=self.tokenizer,
            seed=self.config.seed, can_fit=scheduler.can_ever_fit,
        )
        self._requests: dict[str, Request] = {}  # unfinished
        self._named = 0  # requests that were given a number for an id
        self._ready: list[Request] = []  # ended requests of add_request that step() has not returned yet
        self._finish_count = 0
        self._auditing = 0
        self._loads = self.model.weights.loads
        self._fingerprint = self.model.weights.fingerprint()
        self.model.users.add(self)
        seconds = self.config.stall_seconds
        self._watchdog = None if seconds is None else Watchdog(seconds, self._describe)

    def __repr__(self) -> str:
        c, config = self.model_config, self.config
        return (f"RolloutEngine({c.architecture}, {c.num_layers} layers of {c.hidden_size}, {config.dtype} on "
                f"{config.device}, speculation {config.speculation.method!r}, {len(self._requests)} in flight)")

    def _find_vocab_limit(self) -> int | None:
        """Ids at or beyond the tokenizer's length are padding rows of the head: never emitted."""
        if self.config.mask_padding_ids is False or (self.config.mask_padding_ids is None and self.tokenizer is None):
            return None
        if self.tokenizer is None:
            raise refuse("EngineConfig.mask_padding_ids", "None or False (this engine has no tokenizer)", True,
                         "pass tokenizer= to RolloutEngine")
        size = len(self.tokenizer)
        return size if size < self.model_config.vocab_size else None

    # ---------------------------------------------------------------- rollouts

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Seq[SamplingParams] | None = None, *,
        use_tqdm: bool = False, speculate: bool = True, token_quota: int | None = None,
        group_ids: Seq[str] | None = None, prior_output_ids: Seq[Seq[int] | None] | None = None,
    ) -> list[RequestOutput]:
        """Roll out all prompts to their ends and return one RequestOutput a prompt, in order.

        prompts: a list (or a single one) of text, token ids, chat messages, {"prompt": text} or
        {"prompt_token_ids": ids}. speculate=False decodes this call plainly: the same tokens, more passes.
        token_quota: each sample pauses after that many new tokens (finish_reason "paused", see `resume`). The cut is
        the same with and without speculation, unlike cuts by time or steps, which favour predictable responses.
        group_ids: ties prompts together as siblings (default: equal prompt ids). prior_output_ids: for each prompt, ids
        of a partial response that the caller sends back; they count as output for penalties and limits.
        """
        items = as_prompt_list(prompts)
        params = params_for_each(sampling_params, len(items))
        groups = _one_each("group_ids", group_ids, len(items))
        priors = _one_each("prior_output_ids", prior_output_ids, len(items))
        with self._lock:
            self._refuse_inside_step("generate")
            self._refuse_halted("generate")
            requests = [
                self._intake.request(
                    item, p, name=f"prompts[{i}]", group_id=group, prior=prior, speculate=speculate,
                    token_quota=token_quota,
                )
                for i, (item, p, group, prior) in enumerate(zip(items, params, groups, priors))
            ]
            self._queue(requests, owned_by_call=True)
        return self._run_to_end(requests, use_tqdm)

    def resume(
        self, outputs: RequestOutput | Seq[RequestOutput], *, use_tqdm: bool = False, speculate: bool = True,
        token_quota: int | None = None,
    ) -> list[RequestOutput]:
        """Continue paused outputs of this engine or another. Under unchanged weights the result is the uninterrupted
        stream; under other weights the segment rises, so the cut leaks nothing into what follows. Outputs without a
        paused sample come back as they are."""
        listed = [outputs] if isinstance(outputs, RequestOutput) else as_list(outputs, "outputs", "RequestOutputs")
        for i, output in enumerate(listed):
            if not isinstance(output, RequestOutput):
                expected = "a RequestOutput of generate or resume"
                raise refuse(f"outputs[{i}]", expected, type(output).__name__, "pass it whole")
        with self._lock:
            self._refuse_inside_step("resume")
            self._refuse_halted("resume")
            restored = [
                None if o.state is None
                else self._intake.restore(o, o.state, self._weights, speculate=speculate, token_quota=token_quota)
                for o in listed
            ]
            requests = [r for r in restored if r is not None]
            self._queue(requests, owned_by_call=True, fresh=False)
        finished = iter(self._run_to_end(requests, use_tqdm))
        return [output if request is None else next(finished) for output, request in zip(listed, restored)]

    def score(self, prompt_ids: Seq[int], output_ids: Seq[int], params: SamplingParams | None = None) -> list[float]:
        """Teacher-forced log-probabilities (nats) of output_ids after prompt_ids, one a token, through the same pass
        and the same processing as rollouts: of the processed distribution under `params` (default: temperature 1, no
        filters), -inf where a filter, a mask or min_tokens bars the token. Everything behind prompt_ids counts as
        output. Refuses a logits_processor."""
        params = params_for_each(params, 1)[0]
        if params.logits_processor is not None:
            raise refuse("params.logits_processor", "None in score", params.logits_processor, "apply it to next_logits")
        with self._lock:
            self._refuse_inside_step("score")
            self._refuse_halted("score")
            given = tuple(check_ids(output_ids, self.model_config.vocab_size, "output_ids"))
            forced = replace(
                params, n=1, max_tokens=len(given), min_tokens=min(params.min_tokens, len(given)), stop=None, seed=0,
                logprobs=None, prompt_logprobs=None, raw_logprobs=False,
            )
            request = self._intake.request(prompt_ids, forced, name="prompt_ids", forced=given)
            room = request.samples[0].seq.room
            if room < len(given):
                expected = f"at most {room} tokens after this prompt (max_model_len {self.max_model_len})"
                raise refuse("output_ids", expected, len(given), "score a shorter output")
            self._queue([request], owned_by_call=True, fresh=False)
        output = self._run_to_end([request], use_tqdm=False)[0].outputs[0]
        if output.finish_reason != "length":
            raise RuntimeError(f"score: ended early ({output.finish_reason}: {output.stop_reason}); call it again")
        return output.sampled_logprobs

    # ---------------------------------------------------------------- the caller's own loop

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None,
        group_id: str | None = None, prior_output_ids: Seq[int] | None = None, speculate: bool = True,
        token_quota: int | None = None, stream: bool = False,
    ) -> str:
        """Queue one prompt; `step` returns its output once all its samples have ended. Returns the request's id.
        stream: keep its text up to date for `progress`."""
        with self._lock:
            if request_id is not None and not isinstance(request_id, str):
                raise refuse("request_id", "a string or None", request_id, "pass str(id)")
            if request_id in self._requests:
                remedy = "abort it first, or choose another"
                raise refuse("request_id", "an id that is not in flight", request_id, remedy)
            request = self._intake.request(
                prompt, params_for_each(sampling_params, 1)[0], request_id=request_id, group_id=group_id,
                prior=prior_output_ids, speculate=speculate, token_quota=token_quota, streamed=stream,
            )
            self._queue([request], owned_by_call=False)
            return request.request_id

    def step(self) -> list[RequestOutput]:
        """One target pass over everything that runs; none while generation is paused. Returns the requests of
        `add_request` that have ended."""
        with self._lock:
            self._refuse_inside_step("step")
            if not self._paused:
                self._refuse_halted("step")
                self._step()
            ready, self._ready = self._ready, []
            return [request.to_output(self._weights) for request in ready]

    def progress(self, request_id: str) -> RequestOutput | None:
        """A copy of what a request in flight has so far; None when it is not in flight. Its text is "" unless it was
        added with stream=True or a sample has ended."""
        with self._lock:
            request = self._requests.get(request_id)
            return None if request is None else request.so_far(self._weights)

    def abort(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now with finish_reason "abort" and return what they have. Ids that are not in flight are
        ignored: a request may just have ended."""
        ids = [request_ids] if isinstance(request_ids, str) else as_list(request_ids, "request_ids", "an id or several")
        with self._lock:
            self._refuse_inside_step("abort")
            requests = [r for i in ids if (r := self._requests.get(i)) is not None]
            for request in requests:
                self._abort(request)
            return [request.to_output(self._weights) for request in requests]

    def has_unfinished(self) -> bool:
        with self._lock:
            return bool(self._core.samples or self._ready)

    @property
    def steps(self) -> int:
        """Target forwards since the engine was built."""
        return self._core.counters.steps

    @property
    def num_running(self) -> int:
        """Samples that hold KV pages now."""
        return len(self._core.scheduler.running) + len(self._core.scheduler.prefilling)

    # ---------------------------------------------------------------- the learned drafter

    def update_drafter(self, source: EagleModel | Mapping[str, Tensor], *, version: str | int | None = None) -> str:
        """Copy new weights into the learned drafter, in place and between steps: an EagleModel of the same shape, or
        {SpecForge name: tensor}. Refused whole if a name or shape differs. Its K and V are computed again from hidden
        states it has kept; the target runs no further. Returns the version (default: a count), which outputs show in
        drafter_versions."""
        with self._lock:
            self._refuse_inside_step("update_drafter")
            self._refuse_without_memory("update_drafter", "drafter")
            drafter = self._core.drafter
            if not isinstance(drafter, EagleDrafter):
                raise refuse("update_drafter", "an engine with SpeculationConfig(method='learned')",
                             self.config.speculation.method, "build one with a drafter")
            return drafter.load(source, version)

    @property
    def drafter(self) -> Drafter | None:
        """What drafts; None without speculation."""
        return self._core.drafter

    @property
    def spec_counts(self) -> SpecCounts:
        """A copy of the counts of speculation since the engine was built."""
        with self._lock:
            return self._core.counters.spec.copy()

    def record_hidden(self, recorder: HiddenRecorder) -> None:
        """Hand it the hidden states of committed tokens from the next pass on: a training.HiddenStateBuffer, say. While
        anybody takes them, plain steps are not launched ahead of their outputs."""
        with self._lock:
            self._refuse_inside_step("record_hidden")
            self._core.attach(recorder)

    def stop_recording(self, recorder: HiddenRecorder) -> None:
        with self._lock:
            self._refuse_inside_step("stop_recording")
            self._core.detach(recorder)

    # ---------------------------------------------------------------- upkeep

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Pages in use stay with their samples; update_weights does this by itself."""
        with self._lock:
            self._refuse_inside_step("reset_prefix_cache")
            if self._prefix is not None:
                self._prefix.reset()

    def stats(self) -> dict[str, Any]:
        """Counts since the engine was built, and bytes by owner. Names are explained in engine/counters.py."""
        with self._lock:
            core = self._core
            return core.counters.as_dict() | {
                "preemptions": core.scheduler.stats.preemptions,
                "prefix_hit_tokens": core.scheduler.stats.prefix_hit_tokens,
                "forks": core.scheduler.stats.forks,
                "pages": {name: getattr(self._pool, name) for name in ("total", "free", "idle", "used")},
                "weight_version": core.version,
                "memory": {
                    "weights": self.model.weights.bytes,
                    "kv": core.runner.kv.bytes,
                    "buffers": core.runner.buffer_bytes,
                    "drafter": 0 if core.drafter is None else core.drafter.memory_bytes(),
                },
                "drafter": core.drafter.stats() if isinstance(core.drafter, EagleDrafter) else None,
                "speculating": core.drafter is not None and core.elastic.on,
                "speculation_switches": core.elastic.switches,
                "graphs": core.runner.graph_report(),
                "prefill_backend": core.runner.prefill_backend,
            }

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs of all sizes now instead of each at its first use, as far as graph_bytes goes."""
        with self._lock:
            self._refuse_inside_step("capture_graphs")
            self._core.runner.capture_graphs()

    def release_graphs(self) -> None:
        """Give the memory of the CUDA graphs back, say to a trainer on the same device. They return at first use."""
        with self._lock:
            self._refuse_inside_step("release_graphs")
            self._core.runner.release_graphs()

    def check_integrity(self) -> None:
        """Assert the engine's own invariants; with nothing in flight no page may be in use."""
        with self._lock:
            scheduler = self._core.scheduler
            scheduler.check_integrity()
            scheduled = {s.seq_id for s in (*scheduler.running, *scheduler.prefilling, *scheduler.waiting)}
            assert set(self._core.samples) == scheduled, f"samples {set(self._core.samples)} != scheduled {scheduled}"
            if not scheduled:
                assert self._pool.used == 0, f"nothing in flight, yet pages in use: {self._pool.used} != 0"

    def next_logits(self, token_ids: Seq[int]) -> Tensor:
        """fp32 [V]: the target's unmodified logits after token_ids, in one plain pass with its own KV. For checks."""
        from tlt_engine.engine.equality import plain_logits

        ids = check_ids(token_ids, self.model_config.vocab_size, "token_ids")
        if len(ids) > (limit := self.model.max_model_len):
            raise refuse("token_ids", f"at most max_model_len = {limit} ids", len(ids), "shorten them")
        with self._lock:  # nobody takes the weights away meanwhile
            self._refuse_halted("next_logits")
            return plain_logits(self.model, ids)

    # ---------------------------------------------------------------- inside

    def _queue(self, requests: Seq[Request], *, owned_by_call: bool, fresh: bool = True) -> None:
        self._announce_work()
        if fresh:
            self._intake.separate_equal_entries(requests, self._weights)
        for request in requests:
            request.request_id = self._free_id(request.request_id)
            request.owned_by_call = owned_by_call
            running = [sample for sample in request.samples if not sample.ended]
            request.unfinished = len(running)
            self._requests[request.request_id] = request
            for sample in running:
                self._core.add(sample)

    def _free_id(self, wanted: str) -> str:
        """`wanted`, or the next number if that is empty or in flight."""
        while not wanted or wanted in self._requests:
            self._named += 1
            wanted = str(self._named)
        return wanted

    def _in_flight(self, request: Request) -> bool:
        """Not by the id alone: once a request has ended, its id may be another's."""
        return self._requests.get(request.request_id) is request

    def _step(self) -> None:
        if self.model.weights.loads != self._loads:  # by another engine on this LoadedModel, or by the caller
            self._take_new_weights(None)
        self._stepping = True
        try:
            with self._watchdog.watching() if self._watchdog is not None else nullcontext():
                ran = self._core.step()
        finally:
            self._stepping = False
        if not ran and self._core.samples:
            raise RuntimeError(
                f"the scheduler ran nothing with {len(self._core.samples)} unfinished samples "
                f"({self.num_running} holding pages, {self._pool.free} of {self._pool.total} pages free)"
            )

    def _describe(self) -> str:
        """What the watchdog says of a step that does not end."""
        scheduler, pages = self._core.scheduler, self._pool
        lines = [
            f"steps {self.steps}, pages free {pages.free} of {pages.total}, waiting {len(scheduler.waiting)}, "
            f"weight version {self._core.version}"
        ]
        for kind, seqs in (("running", scheduler.running), ("prefilling", scheduler.prefilling)):
            lines += [
                f"{kind} seq {s.seq_id}: {len(s.token_ids)} tokens ({s.prompt_len} of the prompt), kv {s.kv_len}, "
                f"pages {len(s.pages)}, group {s.group[:12]}"
                for s in seqs
            ]
        return "\n".join(lines)

    def _on_end(self, sample: Sample) -> None:
        out, params = sample.output, sample.request.params
        out.preemptions = sample.seq.preemptions
        if sample.audit_of is not None:
            self._auditing -= 1
            if out.finish_reason != "abort":
                self._core.counters.audit_checked += 1
                self._core.counters.audit_differing += out.token_ids != sample.audit_of.output.token_ids
            return
        if sample.text is None and self.tokenizer is not None and params.detokenize and sample.forced is None:
            out.text = self.tokenizer.decode(out.token_ids, skip_special_tokens=params.skip_special_tokens)
        if sample.forced is None:
            finished = self._core.counters.finished
            finished[out.finish_reason or ""] = finished.get(out.finish_reason or "", 0) + 1
            if out.finish_reason != "paused":
                out.finish_order = self._finish_count
                self._finish_count += 1
            if self._audited(sample):
                self._auditing += 1
                self._core.add(self._intake.audit(sample))
        request = sample.request
        request.unfinished -= 1
        if not request.unfinished:
            self._may_run.notify_all()  # its caller may be waiting for an engine that is halted
        if not request.unfinished and self._in_flight(request):
            del self._requests[request.request_id]
            if not request.owned_by_call:
                self._ready.append(request)

    def _audited(self, sample: Sample) -> bool:
        share = self.config.speculation.audit
        if share <= 0 or not sample.seq.speculate or sample.output.finish_reason not in ("stop", "length"):
            return False
        if [span.version for span in sample.output.weight_versions] != [self._core.version]:
            return False  # its first tokens came from other weights: a second run could not be equal
        return random.Random(sample.seq.key ^ sample.seq.sample).random() < share

    def _abort(self, request: Request) -> None:
        if self._in_flight(request):
            del self._requests[request.request_id]
        for sample in request.samples:
            if not sample.ended:
                self._core.end(sample, Stop("abort"))

    def _run_to_end(self, requests: Seq[Request], use_tqdm: bool) -> list[RequestOutput]:
        bar = None
        try:
            bar = _progress_bar(requests) if use_tqdm else None
            while True:
                with self._lock:
                    if not any(self._in_flight(r) for r in requests) and not self._auditing:
                        return [r.to_output(self._weights) for r in requests]
                    if self._halted() is not None:
                        self._may_run.wait(LOOK_AGAIN_S)
                        continue
                    self._step()
                if bar is not None:
                    bar.n = sum(len(r.samples) - r.unfinished for r in requests)
                    bar.refresh()
        except BaseException:  # Ctrl-C too: what this call started ends with it, and the engine stays usable
            with self._lock:
                for request in requests:
                    self._abort(request)
                for sample in list(self._core.samples.values()):
                    if sample.audit_of is not None and sample.request in requests:
                        self._core.end(sample, Stop("abort"))
            raise
        finally:
            if bar is not None:
                bar.close()


def _one_each(name: str, given: Seq[Any] | None, count: int) -> Seq[Any]:
    if given is None:
        return [None] * count
    given = as_list(given, name, f"one entry a prompt ({count})")
    if len(given) != count:
        raise refuse(name, f"one entry a prompt ({count})", len(given), "match the lengths")
    return given


def _progress_bar(requests: Seq[Request]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=sum(len(r.samples) for r in requests), desc="samples", unit="sample")


