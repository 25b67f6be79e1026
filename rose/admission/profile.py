"""Step-time profiles: the files that keep the fits, and their plot. No engine is run here."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from rose.admission.step_time import (
    StepObservation,
    StepTimeModel,
    attended_pairs,
    drop_warm_up,
    fit,
    fit_errors,
)
from rose.errors import ConfigError

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile is valid for."""

    model: str
    hardware: str
    vllm_version: str
    parallelism: str
    dtype: str
    quantization: str
    kv_dtype: str
    graphs: str
    """Which steps are captured as CUDA graphs, as vLLM calls it, or "eager"."""
    speculation: str = "none"
    """How draft tokens are made, and how many."""

    @property
    def file_name(self) -> str:
        """A readable file name, which differs for different keys."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.model).strip("-")[-40:]
        return f"{readable}-{digest}.json"


def fit_profile(observations: Sequence[StepObservation], key: ProfileKey, directory: Path) -> StepTimeModel:
    """Fits the observations, and writes the fit to the key's file in ``directory``, replacing an older one.

    Raises: ValueError if there are too few observations.
    """
    model = fit(observations)
    errors = fit_errors(model, observations)
    body = {
        "format": FORMAT_VERSION,
        "key": asdict(key),
        "model": model.to_json(),
        "errors": asdict(errors),
        "observations": [astuple(one) for one in observations],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / key.file_name
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(body) + "\n")
    draft.replace(path)
    return model


def load_profile(directory: Path, key: ProfileKey) -> tuple[StepTimeModel, list[StepObservation]] | None:
    """Loads the stored fit and the steps that it was made from; None if there is none for this key.

    Raises: ConfigError for a file that is no profile.
    """
    path = directory / key.file_name
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_text())
        if body["format"] != FORMAT_VERSION or body["key"] != asdict(key):
            return None
        observations = [observation_of(one) for one in body["observations"]]
        return StepTimeModel.from_json(body["model"]), observations
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a step-time profile ({error}); delete it and profile again"
        ) from error


def observation_of(values: Sequence[float]) -> StepObservation:
    """Inverts dataclasses.astuple. Raises: ValueError for another number of fields."""
    prefill_tokens, num_decodes, context_tokens, prefill_pairs, seconds = values
    return StepObservation(
        prefill_tokens=int(prefill_tokens),
        num_decodes=int(num_decodes),
        context_tokens=int(context_tokens),
        prefill_pairs=prefill_pairs,
        seconds=seconds,
    )


def nearest_profile(directory: Path, key: ProfileKey) -> str:
    """Returns how the model's nearest profile differs from ``key``; empty if the model has none."""
    wanted, nearest = asdict(key), list[str]()
    for path in directory.glob("*.json"):
        try:
            stored = json.loads(path.read_text())["key"]
            different = [
                f"{n} {stored.get(n)} (here {wanted[n]})" for n in wanted if stored.get(n) != wanted[n]
            ]
            if stored["model"] == key.model and (not nearest or len(different) < len(nearest)):
                nearest = different
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a profile: whoever loads it says so
    return ", ".join(nearest)


def plot_profile(model: StepTimeModel, observations: Sequence[StepObservation], path: Path) -> None:
    """Draws observed and fitted step times of prefills and of decodes. Needs matplotlib.

    The shaded band reaches from the fit to the time that the gate uses, which 99 of 100 steps stay within.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    prefill, decode = figure.subplots(1, 2)
    kept = drop_warm_up(observations)
    prefills = [o for o in kept if o.num_decodes == 0]
    _scatter(prefill, "prefill tokens in the step", [(o.prefill_tokens, o.seconds) for o in prefills])
    whole = sorted({o.prefill_tokens for o in prefills})
    _fitted(prefill, model, [(n, 0, 0, attended_pairs(n)) for n in whole], ", nothing computed before")
    decodes = [o for o in kept if o.prefill_tokens == 0]
    _scatter(decode, "decodes in the step", [(o.num_decodes, o.seconds) for o in decodes])
    contexts = sorted(o.context_tokens // o.num_decodes for o in decodes)
    for context in sorted({contexts[0], contexts[-1]}) if contexts else []:
        shapes = [(0, count, count * context, 0.0) for count in sorted({o.num_decodes for o in decodes})]
        _fitted(decode, model, shapes, f", context {context}")
    for axes in (prefill, decode):
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path)


def _scatter(axes: Any, label: str, points: Sequence[tuple[int, float]]) -> None:
    axes.scatter(
        [at for at, _ in points], [1e3 * s for _, s in points], s=12, color="black", label="observed"
    )
    axes.set_xlabel(label)
    axes.set_ylabel("step (ms)")


def _fitted(
    axes: Any, model: StepTimeModel, shapes: Sequence[tuple[int, int, int, float]], note: str
) -> None:
    at = [prefill + decodes for prefill, decodes, _, _ in shapes]
    fitted_ms = [1e3 * model.predict(*shape) for shape in shapes]
    (line,) = axes.plot(at, fitted_ms, label=f"fitted{note}")
    safe_ms = [1e3 * model.predict_safe(*shape) for shape in shapes]
    axes.fill_between(at, fitted_ms, safe_ms, color=line.get_color(), alpha=0.2, label="used by the gate")
