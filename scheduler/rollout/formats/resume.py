"""Finishing a generation that was cut: what has arrived, what to ask for next, the merged answer.

Owns: Accumulated, the tokens of one single request over all its attempts; the choice between resume and
restart.
Promises: however a generation is cut into attempts, the merged answer holds each token once, in order, with
its log-probability and the worker and weight version that made it. Chunks of abandoned attempts are dropped.
Never does: I/O, choose workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rose.scheduler.rollout.formats.bodies import Json, TokenIds
from rose.scheduler.rollout.formats.events import COMPLETIONS_PATH, Chunk
from rose.scheduler.rollout.formats.routed import PROMPT_START, RoutedExperts
from rose.scheduler.rollout.formats.salt import salted
from rose.types import WeightVersion

_DEFAULT_MAX_TOKENS = 16
"""The default of vLLM's /v1/completions, where max_tokens is absent or null."""
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1
_STATEFUL = ("stop", "thinking_token_budget")
"""Their state spans all generated tokens, but a continuation takes the first part for a prompt."""
_GRAMMARS = ("structured_outputs", "response_format")
_COUNTING = ("presence_penalty", "frequency_penalty", "bad_words", "repetition_detection")
"""The state of these and of grammars spans all tokens, too, and ROSE's engines count those that a
continuation brings as generated."""
_OWN_ARGUMENTS = "rose_"
"""How those of the `vllm_xargs` begin that ROSE itself reads. Others may have a state in the engine."""
_GENERATED = "rose_generated"
"""Tells an engine how many tokens at the end of the prompt were generated before."""
REASONING_ENDED = "rose_reasoning_ended"
"""Tells an engine whether the prompt ends the reasoning."""
TEMPLATE_KWARGS = "rose_chat_template_kwargs"
"""Tells an engine what the chat template was given."""
ROUTERS_ARGUMENTS = (_GENERATED, REASONING_ENDED, TEMPLATE_KWARGS)
"""Those of the `vllm_xargs` that clients may not send."""
_TEXT = {"type": "text"}
"""A response_format that constrains nothing."""
_LOGPROB_LISTS = ("token_logprobs", "tokens", "top_logprobs")


def must_restart(body: Mapping[str, Any]) -> bool:
    """Returns whether a cut generation has to start again, because a constraint's state can't be carried
    over."""
    arguments = body.get("vllm_xargs")
    names = arguments if isinstance(arguments, dict) else ()
    is_others = any(not name.startswith(_OWN_ARGUMENTS) for name in names)
    return is_others or any(body.get(name) for name in _STATEFUL)


def has_grammar(body: Mapping[str, Any]) -> bool:
    """Returns whether the answer is bound to a grammar."""
    return any(body.get(name) and body[name] != _TEXT for name in _GRAMMARS)


def has_state(body: Mapping[str, Any]) -> bool:
    """Returns whether only an engine that takes over the state of a cut generation can continue it."""
    return has_grammar(body) or any(body.get(name) for name in _COUNTING)


def known_prompt(body: Mapping[str, Any]) -> TokenIds | None:
    """Returns the prompt's ids if the worker uses exactly these; None if only the worker knows them."""
    prompt = body.get("prompt")
    is_whole = body.get("truncate_prompt_tokens") is None
    return prompt if is_whole and isinstance(prompt, TokenIds) else None


def text_offsets(tokens: Sequence[str], start: int = 0) -> list[int]:
    """Returns where each token begins in the text. vLLM counts the lengths of the tokens as printed."""
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens that one worker made with one version of the weights."""

    worker: str
    weight_version: WeightVersion | None
    num_tokens: int

    def as_json(self) -> Json:
        version = str(self.weight_version) if self.weight_version is not None else None
        return {"worker": self.worker, "weight_version": version, "tokens": self.num_tokens}


@dataclass(slots=True)
class Accumulated:
    """One single request (one prompt, n = 1) over all its attempts, which are numbered by epochs.

    chat.py has the differences of a chat.
    """

    path: ClassVar[str] = COMPLETIONS_PATH
    """The workers' path for the request."""

    request: Mapping[str, Any]
    epoch: int = 0
    prompt_token_ids: TokenIds | None = None
    num_prompt_tokens: int | None = None
    """The prompt's tokens as a worker counted them."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    num_printed: int = 0
    """The length of all tokens as printed in `logprobs`."""
    spans: list[Span] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_resumes: int = 0
    num_restarts: int = 0
    cached_tokens: int | None = None
    needs_text: bool = True
    """Whether the client wants text beside the ids. If not, a cut may come within a character."""
    extends_last_turn: bool | None = None
    """Whether the prompt begins with all tokens of the trajectory's last turn; None if that can't be told."""
    routed_experts: RoutedExperts = field(default_factory=RoutedExperts)
    is_told_reasoning: bool = False
    """Whether only an engine that takes over state knows where the grammar begins."""

    @property
    def max_tokens(self) -> int:
        given = self.request.get("max_tokens")
        return given if given is not None else _DEFAULT_MAX_TOKENS

    @property
    def is_exhausted(self) -> bool:
        """Whether all tokens have arrived, and only the finish was lost with its worker."""
        return self.num_tokens > 0 and self.num_tokens >= self.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def must_restart(self) -> bool:
        """Whether a cut forces the generation to start again."""
        return self.prompt_token_ids is None or must_restart(self.request)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Begins behind tokens that another router has sent the client."""
        if token_ids:
            self.token_ids, self.num_resumes = list(token_ids), 1

    def begin(self) -> int:
        """Starts the next attempt and returns its epoch. Chunks of earlier epochs are dropped from now on."""
        if self.token_ids:
            if self.must_restart:
                self._forget()
                self.num_restarts += 1
            else:
                self.num_resumes += 1
        self.epoch += 1
        return self.epoch

    @property
    def continues_state(self) -> bool:
        """Whether the next attempt needs an engine that takes over the state of a cut generation."""
        return bool(self.token_ids) and has_state(self.request)

    def restart(self) -> None:
        """Starts the attempt that was begun as a resume from the prompt alone."""
        self._forget()
        self.num_resumes -= 1
        self.num_restarts += 1

    def _forget(self) -> None:
        self.text, self.token_ids, self.logprobs, self.spans = "", [], None, []
        self.num_printed = 0
        self.routed_experts.restart()

    def drop_last(self, count: int) -> None:
        """Drops the last `count` tokens, none of which has given text."""
        if not count:
            return
        del self.token_ids[-count:]
        for values in (self.logprobs or {}).values():
            del values[-count:]
        self.num_printed = sum(len(token) for token in (self.logprobs or {}).get("tokens", ()))
        while count:
            last = self.spans.pop()
            if last.num_tokens > count:
                self.spans.append(replace(last, num_tokens=last.num_tokens - count))
            count -= min(count, last.num_tokens)

    def add(self, epoch: int, chunk: Chunk, worker: str, version: WeightVersion | None) -> bool:
        """Adds a chunk. Returns False if it belongs to an attempt that was abandoned."""
        if epoch != self.epoch or self.finish_reason is not None:
            return False
        self._take_context(chunk)
        if chunk.routed_experts is not None:
            self.routed_experts.take(chunk.routed_experts)
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self._add_logprobs(chunk.logprobs)
        if chunk.token_ids:
            self._add_span(worker, version, len(chunk.token_ids))
        return True

    def _take_context(self, chunk: Chunk) -> None:
        """Takes in what a chunk says about the prompt."""
        if self.prompt_token_ids is None:
            self.prompt_token_ids = chunk.prompt_token_ids

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        if self.logprobs is None:
            self.logprobs = {name: [] for name in _LOGPROB_LISTS}
        for name in _LOGPROB_LISTS:
            self.logprobs[name].extend(logprobs[name])
        self.num_printed += sum(len(token) for token in logprobs["tokens"])

    def _add_span(self, worker: str, version: WeightVersion | None, num_tokens: int) -> None:
        if self.spans and (self.spans[-1].worker, self.spans[-1].weight_version) == (worker, version):
            num_tokens += self.spans.pop().num_tokens
        self.spans.append(Span(worker=worker, weight_version=version, num_tokens=num_tokens))

    def begins_span(self, chunk: Chunk) -> bool:
        """Returns whether the chunk, which was just added, is the first of its worker and weight version."""
        return bool(chunk.token_ids) and self.spans[-1].num_tokens == len(chunk.token_ids)

    def finish(self, reason: str | None, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def next_body(self, version: WeightVersion | None = None) -> Json:
        """Returns the next attempt's body: the request, or its continuation from prompt + generated
        tokens."""
        body = salted(dict(self.request), version)
        if not self.token_ids:
            return body
        so_far = self.so_far()
        body |= self._continued(so_far)
        if start := self.routed_experts.resume(so_far.count()):
            body[PROMPT_START] = start
        body["max_tokens"] = self.max_tokens - self.num_tokens
        if has_state(body):
            body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), _GENERATED: self.num_tokens}
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - self.num_tokens)
        if body.get("seed") is not None:
            # The same seed would repeat the random numbers that the first part used.
            body["seed"] = (body["seed"] + _SEED_STEP * self.num_tokens) & _SEED_MASK
        # Both were applied to the original prompt; its ids are sent now.
        body.pop("truncate_prompt_tokens", None)
        body.pop("add_special_tokens", None)
        return body

    def so_far(self) -> TokenIds:
        """Returns the prompt and the generated tokens."""
        assert self.prompt_token_ids is not None
        return self.prompt_token_ids.plus(self.token_ids)

    def _continued(self, ids: TokenIds) -> Json:
        """Returns the fields that make a request continue from these ids."""
        return {"prompt": ids}

    def merged_logprobs(self) -> Json | None:
        if self.logprobs is None:
            return None
        return {"text_offset": text_offsets(self.logprobs["tokens"]), **self.logprobs}

    def provenance(self) -> Json:
        """Returns the `rose` field of a choice. Its cached_tokens are summed over all attempts."""
        recomputed = self.routed_experts.recomputed
        return {
            "spans": [span.as_json() for span in self.spans],
            "resumes": self.num_resumes,
            "restarts": self.num_restarts,
            "cached_tokens": self.cached_tokens,
            "extends_last_turn": self.extends_last_turn,
            **({"recomputed_experts": recomputed} if recomputed else {}),
        }

    def merged_experts(self) -> str | None:
        """Returns the routed experts of all of the turn's tokens but the last; None if some are missing."""
        if not self.routed_experts.have_come:
            return None
        num_prompt = self.prompt_token_ids.count() if self.prompt_token_ids is not None else 0
        return self.routed_experts.merged(num_prompt + self.num_tokens)
