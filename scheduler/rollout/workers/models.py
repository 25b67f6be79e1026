"""Which models are behind the router, and which one a request is for.

Owns: the catalogue of the models that each registered worker serves.
Promises: a look-up takes the same time for any number of workers. The models of a lost worker stay known,
since turns wait for it. Names come only from workers, never from clients.
Never does: ask workers (registry.py), place turns (placing/policy.py).
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from rose.messages import parse_version
from rose.scheduler.rollout.formats.bodies import BadRequest, Json
from rose.scheduler.rollout.placing.views import AdapterVersions, Contexts


class ModelCard(BaseModel):
    """One model in a worker's /v1/models. Unknown fields are kept and shown."""

    model_config = ConfigDict(extra="allow")
    id: str
    max_model_len: int | None = None

    def as_json(self) -> Json:
        return self.model_dump(exclude_unset=True)


class ModelCards(BaseModel):
    """The answer to GET /v1/models, as far as the router uses it."""

    data: list[ModelCard]


def adapters_of(versions: Iterable[str]) -> AdapterVersions:
    """Returns the versions of adapters, such as "run/7", by their runs. Raises: WorkerError."""
    found = [version for text in versions if (version := parse_version(text)) is not None]
    return {version.run_id: version for version in found}


def with_adapters(models: Contexts | None, adapters: Collection[str]) -> Contexts | None:
    """Returns a worker's models with its LoRA adapters by their runs, instead of each version by itself."""
    if models is None or not adapters:
        return models
    context = next(iter(models.values()), None)
    others = {name: size for name, size in models.items() if not is_version(name, adapters)}
    return {**others, **dict.fromkeys(adapters, context)}


def is_version(name: str, adapters: Collection[str]) -> bool:
    """Returns whether a model's name is that of one version of these adapters, such as "run@7"."""
    return name.rpartition("@")[0] in adapters


class _Derived(NamedTuple):
    """What follows from the models of all workers."""

    defaults: tuple[str, ...] = ()
    longest: Mapping[str, int | None] = {}
    """The longest context of each model; None if a worker does not say its own."""
    sizes: Mapping[str, Sequence[int]] = {}
    """The contexts of each model's workers, the shortest first."""


class Catalogue:
    """The models of each registered worker, as it last reported them. Lives on the router's event loop."""

    def __init__(self) -> None:
        self._by_worker: dict[str, Contexts | None] = {}
        self._derived: _Derived | None = _Derived()
        """None after a change, of which thousands come at a start."""
        self._removed: set[str] = set()
        """Models that were served only by workers that were removed since."""

    def __contains__(self, model: object) -> bool:
        return model in self._contexts

    @property
    def names(self) -> list[str]:
        return sorted(self._contexts)

    def take(self, worker_id: str, models: Contexts | None) -> None:
        """Notes what a worker serves; None: it does not say."""
        self._by_worker[worker_id], self._derived = models, None
        self._removed -= (models or {}).keys()

    def forget(self, worker_id: str) -> None:
        """Forgets a worker that was removed."""
        models, self._derived = self._by_worker.pop(worker_id, None), None
        self._removed |= (models or {}).keys() - self._contexts.keys()

    def is_removed(self, model: str) -> bool:
        """Returns whether only workers that are no longer registered served this model."""
        return model in self._removed

    def default(self) -> str | None:
        """Returns the model of a request that names none; None if no worker says what it serves.

        Raises:
            BadRequest: workers have different defaults.
        """
        defaults = self._all().defaults
        if len(defaults) > 1:
            raise BadRequest(f"model: several are served here; name one of {', '.join(self.names)}")
        return defaults[0] if defaults else None

    def context(self, model: str | None) -> int | None:
        """Returns the longest context that any worker has for the model; None if it is unknown."""
        return self._contexts.get(model) if model is not None else None

    def have_several_contexts(self, model: str | None) -> bool:
        """Returns whether the model's workers differ in their contexts."""
        return model is not None and len(self._all().sizes.get(model, ())) > 1

    def least_context(self, model: str | None, num_tokens: float) -> int | None:
        """Returns the shortest context of a worker of the model that holds `num_tokens`, or the longest if
        none does; None if no worker says its own."""
        sizes = self._all().sizes.get(model, ()) if model is not None else ()
        return sizes[min(bisect_left(sizes, num_tokens), len(sizes) - 1)] if sizes else None

    @property
    def _contexts(self) -> Mapping[str, int | None]:
        return self._all().longest

    def _all(self) -> _Derived:
        if self._derived is None:
            self._derived = self._derive()
        return self._derived

    def _derive(self) -> _Derived:
        said = [models for models in self._by_worker.values() if models is not None]
        defaults = tuple(dict.fromkeys(next(iter(models)) for models in said))
        is_all_said = len(said) == len(self._by_worker)
        found: dict[str, list[int | None]] = {}
        for models in said:
            for name, context in models.items():
                found.setdefault(name, []).append(context)
        sizes = {name: sorted({c for c in contexts if c is not None}) for name, contexts in found.items()}
        longest = {
            name: sizes[name][-1] if is_all_said and None not in contexts else None
            for name, contexts in found.items()
        }
        return _Derived(defaults, longest, sizes)
