"""How long the steps of this engine take, measured at every step and kept as a model for the gate.

Owns the clock around a step, the online model, and the observations of a profiling run. Runs in the engine
core's thread alone.
"""

from __future__ import annotations

import logging
import platform
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from rose.admission.online import OnlineStepTime
from rose.admission.profile import ProfileKey, fit_profile, load_profile, nearest_profile
from rose.admission.step_time import StepObservation, StepShape, StepTimeModel, attended_pairs

logger = logging.getLogger(__name__)

LEAST_STEP_S = 1e-6
"""The least length of a step, for a clock that does not tell two outputs apart."""

STALE_S = 10.0
"""The age from which on the last steps do not keep an engine from another one. If the machine is still slow,
one step in this time may end late."""


class StepRecorder:
    """Times steps and fits the step-time model to them. Several may be in flight, and they end in their
    order. A step that waits behind another one takes the time between the two outputs.

    In a pipeline, a step takes longer than the time between two outputs, because the steps in flight are in
    different stages. Each stage takes its share of a step's time, and begins it when it is free and the stage
    before has ended it. The seconds of a step are those of its way through all stages without a wait, and the
    model predicts these.
    """

    def __init__(self, key: ProfileKey, directory: Path, stage_shares: Sequence[float] = (1.0,)) -> None:
        """Starts from the profile stored for ``key``, if any. ``stage_shares``: the share of a step's time
        that each stage of the engine's pipeline takes. Raises: ConfigError if the profile's file is broken.
        """
        self._key = key
        self._directory = directory
        self._stage_shares = stage_shares
        stored = load_profile(directory, key)
        self._online = OnlineStepTime(*stored) if stored is not None else OnlineStepTime(None)
        self._observations: list[StepObservation] | None = None
        self._in_flight: deque[tuple[StepShape, float]] = deque()
        """The shape of each step in flight, and when it was begun."""
        self._free_s = [0.0] * len(stage_shares)
        """When each stage had ended the step that ended last. The last stage's time is measured."""
        self._num_begun = 0
        """The steps that have begun since none was in flight."""
        self.seconds = 0.0
        """The seconds of the step that ended last."""
        self.predicted_s = 0.0
        """The seconds that the model predicted for the step that ended last; 0 without a model."""

    @property
    def is_profiled(self) -> bool:
        """True if the model rests on a profile or on enough steps of this engine."""
        return self._online.is_profiled

    @property
    def model(self) -> StepTimeModel:
        return self._online.model

    @property
    def observed_model(self) -> StepTimeModel:
        """The model that the steps support. Without a profile, ``model`` is more cautious."""
        return self._online.observed

    @property
    def is_recording(self) -> bool:
        """Whether a profiling run is on."""
        return self._observations is not None

    @property
    def nearest_profile(self) -> str:
        """How the stored profile of this model that fits best differs from this engine; empty without one."""
        return nearest_profile(self._directory, self._key)

    def started(self, output: SchedulerOutput, requests: Mapping[str, Request], began_s: float) -> None:
        """Starts the clock of a step with tokens, which began with its scheduling."""
        self._num_begun = 1 + (self._num_begun if self._in_flight else 0)
        self._in_flight.append((shape_of(output, requests), began_s))

    def leave_out(self, seconds: float) -> None:
        """Leaves out ``seconds`` for which the step that ends next was paused."""
        if self._in_flight:
            shape, began_s = self._in_flight[0]
            self._in_flight[0] = shape, began_s + seconds

    @property
    def has_unused_stage(self) -> bool:
        """Whether fewer steps than there are stages have begun since none was in flight."""
        return self._num_begun < len(self._stage_shares)

    def end_of_steps(self) -> float:
        """Returns when the steps in flight will have ended, as the model predicts (time.monotonic)."""
        free_s = self._free_s
        for shape, began_s in self._in_flight:
            free_s = self._behind(free_s, began_s, self.model.predict_step(shape))
        return free_s[-1]

    def _behind(self, free_s: Sequence[float], began_s: float, seconds: float) -> list[float]:
        """Returns when each stage will have ended a step of so many seconds. ``free_s``: when each stage
        will have ended the step ahead."""
        ends_s = []
        for share, from_s in zip(self._stage_shares, free_s, strict=True):
            began_s = max(began_s, from_s) + share * seconds
            ends_s.append(began_s)
        return ends_s

    def _seconds(self, began_s: float, now: float) -> float:
        """Returns the seconds that a step which ends now takes through all stages without a wait.

        From the moment that a stage was free, the step had at least the shares of that stage and of those
        behind it to go: exactly these if this stage was the last one that it waited for, and more if it
        waited for a later one. So the least quotient is the step's time. For the first stage, the moment is
        at the earliest the step's beginning.
        """
        free_s, shares = [max(began_s, self._free_s[0]), *self._free_s[1:]], self._stage_shares
        left = [sum(shares[stage:]) for stage in range(len(shares))]
        return min((now - from_s) / share for from_s, share in zip(free_s, left, strict=True) if share > 0)

    def ended(self, now: float) -> float:
        """Stops the clock of the oldest step when its output is there; returns how many seconds it adds to
        the time with steps in flight."""
        assert self._in_flight, "a step ended that never started"
        shape, began_s = self._in_flight.popleft()
        busy_s = max(LEAST_STEP_S, now - max(began_s, self._free_s[-1]))
        seconds = self.seconds = max(LEAST_STEP_S, self._seconds(began_s, now))
        self._free_s = [*self._behind(self._free_s, began_s, seconds)[:-1], now]
        self.predicted_s = self.model.predict_step(shape) if self.is_profiled else 0.0
        observation = shape.observed(seconds)
        self._online.observe(observation)
        if self._observations is not None:
            self._observations.append(observation)
        return busy_s

    def forget_stale(self, now: float) -> None:
        """Returns to the profile if no step has ended for STALE_S."""
        if now - self._free_s[-1] >= STALE_S:
            self._online.forget()

    def begin_profile(self) -> None:
        """Keeps every observation from now on."""
        self._observations = []

    def finish_profile(self) -> bool:
        """Fits a model to the observations, stores it and uses it. Returns False and keeps the old model if
        that fails: the step loop calls this, and a full disk or a run cut short must not end the engine.
        """
        observations, self._observations = self._observations, None
        try:
            model = fit_profile(observations if observations is not None else [], self._key, self._directory)
        except (ValueError, OSError):
            logger.exception("no profile was made")
            return False
        self._online = OnlineStepTime(model, observations or ())
        logger.info("profile fitted steps=%d model=%s", len(observations or ()), model)
        return True


def shape_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> StepShape:
    """Returns the shape of a step that vLLM has just scheduled; its tokens already count as computed.

    A decode counts once, whatever its number of draft tokens; the model learns its cost with them.
    """
    prefill = decodes = context = 0
    pairs = 0.0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        computed_before = request.num_computed_tokens - num_tokens
        num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if num_tokens - num_drafts == 1 and computed_before >= request.num_prompt_tokens:
            decodes += 1
            context += computed_before
        else:
            prefill += num_tokens
            pairs += attended_pairs(num_tokens, computed_before)
    return StepShape(prefill_tokens=prefill, num_decodes=decodes, context_tokens=context, prefill_pairs=pairs)


def profile_key(config: VllmConfig) -> ProfileKey:
    """Returns what a step-time profile of this engine is valid for."""
    from vllm import __version__
    from vllm.platforms import current_platform

    parallel, model = config.parallel_config, str(config.model_config.model)
    graphs = config.compilation_config.cudagraph_mode
    return ProfileKey(
        model=_real_path(model),
        hardware=_cpu_name() if current_platform.is_cpu() else current_platform.get_device_name(),
        vllm_version=__version__,
        parallelism=_parallelism(parallel),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        quantization=str(config.model_config.quantization or "none"),
        kv_dtype=str(config.cache_config.cache_dtype),
        graphs="eager" if config.model_config.enforce_eager or graphs is None else graphs.name,
        speculation=_speculation(config),
    )


def _parallelism(parallel: ParallelConfig) -> str:
    """Returns the sizes of the kinds of parallelism that divide a step, such as "tp2pp1" or "tp4pp1dcp2"."""
    contexts = {kind: getattr(parallel, f"{kind}_context_parallel_size", 1) for kind in ("prefill", "decode")}
    further = "".join(f"{kind[0]}cp{size}" for kind, size in contexts.items() if size > 1)
    return f"tp{parallel.tensor_parallel_size}pp{parallel.pipeline_parallel_size}{further}"


def stage_shares(config: VllmConfig) -> list[float]:
    """Returns the share of the model's layers that each stage of the pipeline has, which stands for its share
    of a step's time. Heads and embeddings count nothing."""
    num_stages = config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return [1.0]
    num_layers = config.model_config.get_total_num_hidden_layers()
    ranges = (get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages))
    return [(end - start) / num_layers for start, end in ranges]


def num_draft_tokens(config: VllmConfig) -> int:
    """Returns the most draft tokens of a sequence in one step; 0 without speculative decoding."""
    speculative = config.speculative_config
    return (speculative.num_speculative_tokens or 0) if speculative is not None else 0


def _speculation(config: VllmConfig) -> str:
    """Returns the method, the number of draft tokens and the drafter, whose time is a part of each step."""
    speculative = config.speculative_config
    if speculative is None:
        return "none"
    name = f"{speculative.method} of {num_draft_tokens(config)}"
    return f"{name} by {_real_path(str(speculative.model))}" if speculative.model else name


def _real_path(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
