"""How fast a rollout node's engines are, from what each engine measures of itself, for moves of tails.

An engine's profile is a model of its steps (`POST /rose/v1/profile`), and its /metrics count the prompts.
Times are those of the longest context, so that a tail which is moved because of them ends in time.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rose.admission.step_time import StepTimeModel, attended_pairs
from rose.errors import WorkerError
from rose.messages import Profile
from rose.node.control import EngineControl
from rose.scheduler.runtime.job.recording import EngineTimes

LEAST_STEP_S = 1e-6
"""Where an engine's model says that something takes no time at all."""


class EngineTiming:
    """Times the engines of the nodes on which a rollout begins. Raises: WorkerError."""

    def __init__(self, nodes: Sequence[Sequence[EngineControl]]) -> None:
        self._nodes = nodes
        self._counts = [engine.prompt_counts() for node in nodes for engine in node]

    def finish(self, max_tokens: int) -> EngineTimes:
        """Profiles all engines at once, which are idle now. max_tokens: the longest response.

        Raises: WorkerError.
        """
        engines = [engine for node in self._nodes for engine in node]
        prompt_tokens = self._mean_prompt_tokens([engine.prompt_counts() for engine in engines])
        with ThreadPoolExecutor(len(engines)) as threads:
            profiles = iter(list(threads.map(EngineControl.profile, engines)))
        nodes = [[next(profiles) for _ in node] for node in self._nodes]
        return times_of(nodes, prompt_tokens, max_tokens)

    def _mean_prompt_tokens(self, counts: Sequence[tuple[float, float]]) -> int:
        pairs = list(zip(self._counts, counts, strict=True))
        num_requests, num_tokens = (sum(after[i] - before[i] for before, after in pairs) for i in (0, 1))
        if num_requests <= 0:
            raise WorkerError(
                f"the job's {len(pairs)} own engines have finished no request in its first rollout; send the "
                "rollout's turns to them, or write `tail` into the job's file"
            )
        return round(num_tokens / num_requests)


def times_of(nodes: Sequence[Sequence[Profile]], prompt_tokens: int, max_tokens: int) -> EngineTimes:
    """Returns the times of the slowest of these nodes, each with the profiles of its engines, over which its
    responses are spread evenly."""
    context = prompt_tokens + max_tokens
    found = [_node_times(profiles, context) for profiles in nodes if profiles]
    step_s, request_s, tokens_per_s = zip(*found, strict=True)
    return EngineTimes(
        step_s=max(step_s),
        request_s=max(request_s),
        prompt_tokens=prompt_tokens,
        prefill_tokens_per_s=min(tokens_per_s),
    )


def _node_times(profiles: Sequence[Profile], context: int) -> tuple[float, float, float]:
    """Returns the seconds of a decode step, those for each response, and the tokens prefilled in a second."""
    step_s, request_s, tokens_per_s = LEAST_STEP_S, 0.0, 0.0
    for profile in profiles:
        model = StepTimeModel.from_json(profile.model)
        chunk = max(prefill for prefill, *_ in profile.observations)
        prefill_s = model.predict_prefill(context, max(1, chunk), prefill_pairs=attended_pairs(context))
        step_s = max(step_s, model.base_s)
        request_s = max(request_s, (model.per_decode_s + model.per_context_token_s * context) / len(profiles))
        tokens_per_s += context / max(prefill_s, LEAST_STEP_S)
    return step_s, request_s, tokens_per_s
