"""Sending an attempt's request to its worker, and reading the stream of its answer.

Owns: the fields that the router adds to a request.
Promises: a stream that was not read to its end is closed, so that vLLM drops the request.
Never does: know what becomes of the tokens (receive.py), decide how an attempt ended (attempt.py).
"""

from yarl import URL

from rose.http import NO_PROMPT_IDS_HEADER
from rose.scheduler.rollout.formats.bodies import Json, encode_apart
from rose.scheduler.rollout.formats.events import CHAT_PATH, read_events
from rose.scheduler.rollout.formats.resume import Accumulated, known_prompt
from rose.scheduler.rollout.turn.attempt.receive import Receiver, versioned_name
from rose.scheduler.rollout.workers.watch import Watch
from rose.scheduler.rollout.workers.wire import Wire
from rose.types import WeightVersion

_NO_PROMPT_IDS = f"{NO_PROMPT_IDS_HEADER}: 1\r\n".encode()
"""A worker without ROSE's endpoint ignores this and sends the ids."""


def request_body(
    generation: Accumulated,
    version: WeightVersion | None,
    interval: int,
    adapter: WeightVersion | None = None,
) -> Json:
    """Returns the body for the generation's next attempt, on a worker with weights of `version`.

    `interval`: the most tokens per event; the client may have asked for fewer. `adapter`: the version of the
    LoRA adapter that the attempt needs; None: the worker's newest.
    """
    if (asked := generation.request.get("stream_interval")) is not None:
        interval = min(interval, asked)
    return {
        **generation.next_body(version),
        **({"model": versioned_name(adapter)} if adapter is not None else {}),
        "request_id": f"{generation.request['request_id']}-{generation.epoch}",
        "stream": True,
        # A chat's first usage shows whether the worker parses the text (see chunk_of).
        "stream_options": {"include_usage": True, "continuous_usage_stats": generation.path == CHAT_PATH},
        "return_token_ids": True,
        "stream_interval": interval,
    }


async def stream(
    wire: Wire,
    url: URL,
    headers: bytes,
    body: Json,
    receiver: Receiver,
    watch: Watch,
    first_token_s: float,
    stall_s: float,
) -> tuple[int, str]:
    """Streams a request to the receiver. Returns the answer's status, and its text unless that is 200.

    Raises:
        OSError: the connection broke.
        ValueError: the answer is not a stream of completions.
    """
    knows_prompt = known_prompt(body) is not None
    if knows_prompt:
        headers += _NO_PROMPT_IDS
    answer = await wire.post(url, headers, encode_apart(body))
    try:
        if answer.status != 200:
            return answer.status, await answer.text()
        events = read_events(answer.pieces(), skips_prompt=knows_prompt)
        await receiver.read(events, watch, first_token_s, stall_s)
        return answer.status, ""
    finally:
        wire.done(url, answer)
