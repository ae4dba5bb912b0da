"""The model-free drafter: what the samples of a prompt said before, ranked by counts and the request's own noise.

Knows neither model, logits nor text. One suffix automaton for each prompt (csrc/cpu/suffix.h) holds the prompt, its
running samples and its rollouts of earlier calls; one more holds the outputs of all prompts. What has followed the
suffixes of the text so far, longer ones weighing more, gives q: a mixture whose weights are learned online. A draft
token's score is log q + g, with the g that the target will add to its own logit at that position (docs/seeds.md): q
says how likely siblings agree, the noise which of the candidates this sample takes. Drafting from a suffix structure
is SuffixDecoding's idea (arXiv 2411.04975).

Counts come from rollouts at the request's own temperature, filters and penalties, so none of these is applied again.
allowed_token_ids and min_tokens are: candidates they bar are never proposed. logit_bias and logits processors are not
looked at; they can cost acceptance, never correctness.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tlt_kernels.backend import extension
from tlt_kernels.params import GREEDY_BELOW

from tlt_engine.config import SpeculationConfig, refuse
from tlt_engine.speculation.drafter import DraftContext
from tlt_engine.speculation.tree import DraftTree

# Share of the races that a candidate wins = softmax(SHARPNESS * (log q + g)), all unseen tokens racing as one of score
# log(their mass) + UNSEEN_NOISE; how often such shares came true is learned on top. On the products rollouts of SmolLM2
# 0.6 to 0.8 lie on one curve of passes saved against rows; 0.4 and 1.3 fall 0.5 to 1 point below it.
SHARPNESS = 0.7
UNSEEN_NOISE = 0.58  # mean of Gumbel noise


def _address(numbers: array) -> int:
    return numbers.buffer_info()[0]


def _text_key(prompt: Sequence[int]) -> bytes:
    """Equal prompts share their text, whatever call or group they come from."""
    return blake2b(array("q", prompt).tobytes(), digest_size=16).digest()


@dataclass
class _Sample:
    """handle: of the pool. fed: how many of token_ids the pool has, or waits in `queue`."""

    handle: int
    fed: int
    queue: list[int] = field(default_factory=list)


class ModelFreeDrafter:
    """A Drafter (tlt_engine/speculation/drafter.py) that needs no model.

    config: profile (shape of the trees), min_chance and model_free_bytes are read. eos_ids: the model's EOS; with the
    request's stop_token_ids they get no children, and are not proposed before min_tokens.

    The text is taken from context.token_ids at propose and observe, so a drafter that is switched on late, or skipped
    for some steps, catches up by itself, and only committed tokens are ever kept. Over model_free_bytes the texts of
    prompts without running samples go first, the least recently used before the others; if the running ones alone
    exceed it, the largest of them starts again from nothing; so does the common text when it fills half. The budget is
    kept after every call. across_prompts=False drafts from the sample's own prompt alone.
    """

    def __init__(
        self, config: SpeculationConfig, eos_ids: Sequence[int] = (), *, sharpness: float = SHARPNESS,
        unseen_noise: float = UNSEEN_NOISE, across_prompts: bool = True,
    ) -> None:
        self.config = config
        self.eos_ids = tuple(eos_ids)
        self._pool = extension().SuffixPool(config.model_free_bytes, sharpness, unseen_noise, across_prompts)
        self._samples: dict[int, _Sample] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [tree for tree, _ in self.propose_with_chances(contexts)]

    def propose_with_chances(self, contexts: Sequence[DraftContext]) -> list[tuple[DraftTree, list[float]]]:
        """The trees, each with the estimated chance of every node to be accepted (root 1)."""
        samples = [self._take(c) for c in contexts]
        self._feed(self._samples.values())
        requests = array("q")
        room = 0
        for context, sample in zip(contexts, samples):
            row = self._request(context, sample.handle)
            requests.extend(row)
            room += row[7]
        indptr, tokens = array("q", bytes(8 * (len(contexts) + 1))), array("q", bytes(8 * room))
        parents, chances = array("q", bytes(8 * room)), array("d", bytes(8 * room))
        self._pool.propose(
            _address(requests), len(contexts), self.config.min_chance, _address(indptr), _address(tokens),
            _address(parents), _address(chances),
        )
        proposals = []
        for context, start, end in zip(contexts, indptr, indptr[1:]):
            tree = DraftTree.trusted((context.token_ids[-1], *tokens[start + 1 : end]), tuple(parents[start:end]))
            proposals.append((tree, list(chances[start:end])))
        return proposals

    def observe(self, context: DraftContext, accepted: int) -> None:
        """Keeps the new tokens; they join the automaton with those of all other samples at the next propose."""
        self._take(context)

    def finish(self, seq_id: int) -> None:
        """Frees what belongs to the sample alone; its text stays for later rollouts of the prompt."""
        sample = self._samples.pop(seq_id, None)
        if sample is not None:
            self._feed([sample])
            self._pool.close(sample.handle)

    def memory_bytes(self) -> int:
        return self._pool.bytes()

    def _take(self, context: DraftContext) -> _Sample:
        """The sample's record, with all tokens of the context queued that the pool does not have."""
        ids = context.token_ids
        sample = self._samples.get(context.seq_id)
        if sample is None:
            sample = self._samples[context.seq_id] = _Sample(self._open(context), context.prompt_len)
        if len(ids) < sample.fed:
            raise refuse(
                "DraftContext.token_ids", f"at least the {sample.fed} tokens seen before of sequence {context.seq_id}",
                len(ids), "committed tokens never shrink; call finish before a sequence id is used again",
            )
        sample.queue.extend(ids[sample.fed :])
        sample.fed = len(ids)
        return sample

    def _stops(self, context: DraftContext) -> tuple[int, ...]:
        params = context.params
        return (*(() if params.ignore_eos else self.eos_ids), *(params.stop_token_ids or ()))

    def _open(self, context: DraftContext) -> int:
        prompt = array("q", context.token_ids[: context.prompt_len])
        stops = array("q", self._stops(context))
        allowed = array("q", context.params.allowed_token_ids or ())
        return self._pool.open(
            _text_key(prompt), _address(prompt), len(prompt), _address(stops), len(stops), _address(allowed),
            len(allowed),
        )

    def _feed(self, samples: Iterable[_Sample]) -> None:
        """One call for all queued tokens."""
        waiting = [s for s in samples if s.queue]
        if not waiting:
            return
        handles, indptr, tokens = array("q"), array("q", [0]), array("q")
        for sample in waiting:
            handles.append(sample.handle)
            tokens.extend(sample.queue)
            indptr.append(len(tokens))
            sample.queue.clear()
        self._pool.append(_address(handles), _address(indptr), len(handles), _address(tokens))

    def _request(self, context: DraftContext, handle: int) -> tuple[int, ...]:
        """A row of DraftRequest (csrc/cpu/suffix.h)."""
        params, profile = context.params, self.config.profile
        length = len(context.token_ids)
        return (
            handle, context.key, length, context.sample, context.segment, params.temperature < GREEDY_BELOW,
            max(params.min_tokens - (length - context.prompt_len), 0), min(context.max_nodes, profile.verify),
            min(context.max_depth, profile.depth), profile.top_k,
        )
