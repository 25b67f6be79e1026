"""SGLang's /generate: `text` or `input_ids`, one prompt or a batch, run as completions.

Owns: its requests and answers.
Promises: every answer says which worker and which weights made each token, how often the request was resumed,
and how much of its prompt was cached.
Never does: I/O.
"""

from collections.abc import Mapping

from rose.scheduler.rollout.formats.bodies import BadRequest, Json
from rose.scheduler.rollout.formats.completions import CheckRoom, ClientCall, Single, fan_out, usage_of
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.generate import TOKEN_PREFIX, sampling, version_of, weight_versions

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""SGLang's names of sampling parameters, and those of /v1/completions."""
_IGNORED = frozenset(("no_stop_trim", "custom_params", "stop_regex"))


class SglangGenerate:
    """SGLang's /generate as RL trainers use it. See shape.Format."""

    ids_key = "input_ids"
    end = b"data: [DONE]\n\n"

    def call(self, body: Json, check_room: CheckRoom | None) -> ClientCall:
        prompt = body.get("input_ids") if body.get("input_ids") is not None else body.get("text")
        if prompt is None:
            raise BadRequest("input_ids: expected token ids, or a string in text")
        given = body.get("sampling_params")
        if isinstance(given, list):
            raise BadRequest("sampling_params: expected one object for the whole batch")
        completion = sampling(given, _NAMES, _IGNORED)
        # SGLang's own defaults where they differ from those of /v1/completions.
        completion = {"max_tokens": 128, "temperature": 1.0, **completion}
        if body.get("return_logprob"):
            completion["logprobs"] = body.get("top_logprobs_num") or 0
        for name in ("stream", "model", "session_id"):
            if body.get(name) is not None:
                completion[name] = body[name]
        completion |= {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
        rid = body.get("rid")
        return fan_out(completion, check_room, shown_id=rid if isinstance(rid, str) else None)

    def answer(self, call: ClientCall, model: str | None) -> object:
        answers = [self._one(call, single) for single in call.singles]
        return answers if call.is_batch else answers[0]

    def _one(self, call: ClientCall, single: Single) -> Json:
        generation = single.generation
        reason: Json = {"type": generation.finish_reason}
        if generation.finish_reason == "length":
            reason["length"] = generation.num_tokens
        if generation.stop_reason is not None:
            reason["matched"] = generation.stop_reason
        newest = generation.spans[-1] if generation.spans else None
        meta: Json = {
            "id": call.id if len(call.singles) == 1 else f"{call.id}-{single.index}",
            "finish_reason": reason if generation.finish_reason is not None else None,
            "prompt_tokens": usage_of(call, [single])["prompt_tokens"],
            "completion_tokens": generation.num_tokens,
            "cached_tokens": generation.cached_tokens or 0,
            "weight_version": version_of(newest) if newest is not None else None,
            "weight_versions": weight_versions(generation.spans),
            "rose": generation.provenance(),
        }
        if generation.logprobs is not None:
            values = generation.logprobs["token_logprobs"]
            pairs = zip(values, generation.token_ids, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
            meta["input_token_logprobs"] = []
            if any(generation.logprobs["top_logprobs"]):
                tops = generation.logprobs["top_logprobs"]
                meta["output_top_logprobs"] = [_alternatives(top or {}) for top in tops]
        return {"text": generation.text, "output_ids": generation.token_ids, "meta_info": meta}

    def stream_chunk(self, call: ClientCall, single: Single, chunk: Chunk, model: str | None) -> Json:
        """Returns the whole answer so far, which is what SGLang streams."""
        return {**self._one(call, single), "index": single.index}

    def stream_end(self, call: ClientCall, single: Single, model: str | None) -> Json:
        return {**self._one(call, single), "index": single.index}

    def stream_usage(self, call: ClientCall, model: str | None) -> Json | None:
        return None


def _alternatives(top: Mapping[str, float]) -> list[list[float | int | None]]:
    return [[value, int(name.removeprefix(TOKEN_PREFIX)), None] for name, value in top.items()]
