"""Step-time profiles: which steps to measure, and the files that keep the fits.

Owns the measuring plan and the profile files. Never runs an engine: its caller measures the points.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rose.admission.step_time import StepObservation, StepTimeModel, fit, fit_errors
from rose.errors import ConfigError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile is valid for."""

    model: str
    hardware: str
    vllm_version: str
    parallelism: str

    @property
    def file_name(self) -> str:
        """Readable, and distinct for distinct keys."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.model).strip("-")[-40:]
        return f"{readable}-{digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One step shape to measure: the decodes hold `context_tokens` together."""

    prefill_tokens: int
    num_decodes: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """The steps to measure, in order; the first `num_warm_up` are to be thrown away."""

    points: tuple[ProfilePoint, ...]
    num_warm_up: int

    @classmethod
    def covering(
        cls, *, max_prefill_tokens: int, max_decodes: int, max_context_tokens: int, repeats: int = 4
    ) -> "ProfilePlan":
        """Prefill alone, decodes alone at short and long context, and mixed steps.

        `max_context_tokens` is per sequence. Repeats go round the whole set, so that a slow second of
        the machine touches every shape a little rather than one shape wholly.
        """
        if min(max_prefill_tokens, max_decodes, max_context_tokens, repeats) < 1:
            raise ValueError("every bound of a profile plan must be at least 1")
        prefills = _doubling(max_prefill_tokens, 5)
        decodes = _doubling(max_decodes, 4)
        contexts = sorted({max(1, max_context_tokens // 8), max_context_tokens})
        shapes = [(p, 0, 0) for p in prefills]
        shapes += [(0, d, d * c) for d in decodes for c in contexts]
        shapes += [(p, d, d * contexts[0]) for p in prefills[::2] for d in decodes[::2]]
        points = [ProfilePoint(prefill_tokens=p, num_decodes=d, context_tokens=c) for p, d, c in shapes]
        warm_up = [points[len(prefills) - 1], points[-1]]
        return cls(points=tuple(warm_up + points * repeats), num_warm_up=len(warm_up))


def _doubling(most: int, count: int) -> list[int]:
    return sorted({max(1, most >> i) for i in range(count)})


def fit_profile(observations: Sequence[StepObservation], key: ProfileKey, directory: Path) -> StepTimeModel:
    """Fits and writes <directory>/<key's file>, replacing an older one at once.

    Raises ValueError if there are too few observations to fit.
    """
    model = fit(observations)
    errors = fit_errors(model, observations)
    body = {"format": FORMAT_VERSION, "key": asdict(key), "model": model.to_json(), "errors": asdict(errors)}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / key.file_name
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(body, indent=2) + "\n")
    draft.replace(path)
    return model


def load_profile(directory: Path, key: ProfileKey) -> StepTimeModel | None:
    """The stored fit, or None if there is none for this key.

    Raises ConfigError on a file that can't be read as a profile: delete it or profile again.
    """
    path = directory / key.file_name
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_text())
        if body["format"] != FORMAT_VERSION or body["key"] != asdict(key):
            return None
        return StepTimeModel.from_json(body["model"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a step-time profile ({error}); delete it and profile again"
        ) from error


def plot_profile(model: StepTimeModel, observations: Sequence[StepObservation], path: Path) -> None:
    """Writes predicted against observed step times as an image. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    predicted_ms = [
        1e3 * model.predict(o.prefill_tokens, o.num_decodes, o.context_tokens) for o in observations
    ]
    axes.scatter(predicted_ms, [1e3 * o.seconds for o in observations], s=12)
    top_ms = max(predicted_ms)
    axes.plot([0, top_ms], [0, top_ms], color="grey", label="predicted")
    axes.plot(
        [0, top_ms],
        [1e3 * model.margin_s, top_ms * model.ratio_q99 + 1e3 * model.margin_s],
        color="red",
        label="used by the gate",
    )
    axes.set_xlabel("predicted step (ms)")
    axes.set_ylabel("observed step (ms)")
    axes.legend()
    figure.savefig(path)
