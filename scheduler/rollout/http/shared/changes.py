"""The effects of an admin's entries on a router.

Owns: the names of entries, and their effects on workers, jobs, pauses, the version rule and RL steps.
Promises: a router that applies the entries of another router has what that router has. An entry that
contradicts this router's own file, such as another job's key, is logged and has no effect. Never does: check
what an admin sends (http/admin.py).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from rose.errors import ConfigError, RelayError, WorkerError
from rose.messages import parse_version
from rose.scheduler.rollout.http.shared.entries import Entries, Entry, Heard, Value
from rose.scheduler.rollout.placing.versions import VersionMode
from rose.scheduler.rollout.router_config import RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.dataplane import DataPlane
from rose.signature import ANNOUNCED, Verifier, body_of
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

_OTHER_RELEASE = (
    "entry has no effect here: %s because=%s; another release of ROSE wrote it: run one release at all"
    " routers, and set this again"
)


class AdminChanges:
    """The entries of one router and their effects. Runs on its event loop."""

    def __init__(self, plane: DataPlane) -> None:
        """Reads the state file. Raises: ConfigError if it can't be read, or the public key is malformed."""
        self._plane = plane
        key = plane.config.public_key
        self._verifier = Verifier(key) if key is not None else None
        in_settings = frozenset(f"worker {spec.id}" for spec in plane.config.workers)
        self.entries = Entries(plane.registry.name, plane.config.state, in_settings)
        self._announced: dict[str, Value] = {}
        """The entry of the newest announcement of each run that this process has heard."""
        self.noted: Callable[[], None] = lambda: None
        """Called when an admin has set something."""
        self._effects: Mapping[str, Callable[[str, Value], None]] = {
            "worker": self._worker,
            "job": self._job,
            "paused": self._paused,
            "versions": self._versions,
            "step": self._step,
            "forgotten": self._forgotten,
        }

    async def note(self, kind: str, value: Value, name: str = "") -> None:
        """Keeps what an admin has set here, and hands it to the peers. Entries have the order of the calls.
        Raises: OSError."""
        self.entries.put(f"{kind} {name}", value)
        await self.entries.save()
        self.noted()

    def announced(self, version: WeightVersion, step: dict[str, Any]) -> bool:
        """Makes the version that a run's publisher has announced, with a step or by itself, the run's newest.

        Returns False, and changes nothing, if a public key is set and another announcement was newer: a
        publisher's versions only grow. Raises: RelayError if it is not signed.
        """
        signed = step.get("signed")
        newest = self._plane.registry.newest
        if self._verifier is not None:
            if not isinstance(signed, str | None):
                raise RelayError(f"the signed announcement of {version} is no text")
            said = (signed or "").encode()
            self._verifier.require_signed(ANNOUNCED, said)
            if body_of(said).decode() != str(version):
                raise RelayError(f"{version} was announced, but {body_of(said).decode()} is what was signed")
            if version.number < newest.bound(version.run_id):
                return False
        newest.announced(version, time.monotonic())
        self._announced[version.run_id] = step
        return True

    def joined(self, kind: str, fields: dict[str, Any], name: str) -> dict[str, Any]:
        """Returns the given fields together with those that an admin has set of the same thing before."""
        entry = self.entries.all().get(f"{kind} {name}")
        before = entry.value if entry is not None and isinstance(entry.value, dict) else {}
        return {**before, **fields}

    async def restore(self) -> None:
        """Applies what the file of an earlier process holds, before it waits for the first time. Raises:
        ConfigError."""
        entries = self.entries.all()
        self._apply(entries, sorted(entries, key=lambda key: entries[key].rank))
        self._warn_of_overrides(entries)
        newest, now = self._plane.registry.newest, time.monotonic()
        for heard in self.entries.heard:
            version = parse_version(heard.version)
            assert version is not None
            if heard.is_adapter:
                newest.heard_adapter(version, now=now)
            else:
                newest.heard(version, heard.models, now=now)
        try:
            await self.entries.save()
        except OSError as error:
            file = self._plane.config.state
            raise ConfigError(
                f"--state {file}: can't be written ({error.strerror}); check the path"
            ) from error

    def _warn_of_overrides(self, entries: Mapping[str, Entry]) -> None:
        """Logs workers of this router's settings that an admin has removed, drained or changed, and
        pauses."""
        config = self._plane.config
        named = {f"worker {spec.id}": spec.model_dump(mode="json") for spec in config.workers}
        for key, entry in entries.items():
            is_paused = key.startswith("paused ") and entry.value
            if is_paused or (key in named and entry.value != named[key]):
                value = entry.value if entry.value is not None else "removed"
                logger.warning(
                    "what an admin has set still holds: %s is %s file=%s", key, value, config.state
                )

    async def keep_newest(self) -> None:
        """Keeps the newest weights that workers have reported. Raises: OSError."""
        if self._plane.config.state is None:
            return
        newest = self._plane.registry.newest
        by_model = [
            Heard(
                version=f"{run_id}/{number}",
                models=[model] if model is not None else None,
                is_adapter=run_id == model and newest.is_adapter(model),
            )
            for model, numbers in newest.by_model()
            for run_id, number in numbers.items()
        ]
        await self.entries.hear(by_model)

    async def take(self, others: Mapping[str, Entry]) -> None:
        """Takes over what is newer at a peer, and then waits until it is kept. Raises: OSError."""
        if newer := self.entries.merge(others):
            self._apply(others, newer)
            await self.entries.save()

    def _apply(self, entries: Mapping[str, Entry], keys: list[str]) -> None:
        for key in keys:
            kind, _, name = key.partition(" ")
            if kind not in self._effects:
                logger.error(_OTHER_RELEASE, key.strip(), f"this router knows {', '.join(self._effects)}")
                continue
            try:
                self._effects[kind](name, entries[key].value)
            except KeyError as error:
                logger.error(_OTHER_RELEASE, key.strip(), f"it has no {error}")
            except (ValueError, TypeError, ValidationError, RelayError, WorkerError) as error:
                logger.error("entry has no effect here: %s because=%s", key, error)
        if keys:
            self._plane.dispatcher.lend()

    # Effects ------------------------------------------------------------------------------------------------

    def _worker(self, name: str, value: Value) -> None:
        registry, known = self._plane.registry, self._plane.registry.get(name)
        if not isinstance(value, dict):
            if known is not None:
                registry.remove(name)
            return
        fields = dict(value)
        is_draining, spec = bool(fields.pop("draining", False)), WorkerSpec(**fields)
        if known is not None and (known.spec != spec or (known.is_draining and not is_draining)):
            registry.remove(name)
            known = None
        worker = known if known is not None else registry.add(spec)
        if is_draining:
            worker.drain()

    def _job(self, name: str, value: Value) -> None:
        if isinstance(value, dict):
            self._plane.jobs.put(name, RouterJob(**value))
            return
        try:
            self._plane.jobs.forget(name)
        except KeyError:
            pass  # this router has not seen the job
        except ValueError:
            self._plane.jobs.put(name, None)  # it has requests here, which go on

    def _paused(self, name: str, value: Value) -> None:
        if name:
            self._plane.jobs.get(name, time.monotonic()).is_paused = bool(value)
        else:
            self._plane.dispatcher.pause(bool(value))

    def _versions(self, _: str, value: Value) -> None:
        if isinstance(value, dict):
            self._plane.set_versions(VersionMode(value["mode"]), int(value["max_lag"]))

    def _step(self, _: str, value: Value) -> None:
        if not isinstance(value, dict):
            return
        version = parse_version(value.get("version"))
        if version is not None and not self.announced(version, value):
            # A peer was told of an older version after this router was told of the newer one. Earlier
            # releases named the entry without the run.
            self.entries.put(f"step {version.run_id}", self._announced[version.run_id])
        if "step" in value:
            self._plane.dispatcher.lend(begins_anew=True)

    def _forgotten(self, name: str, value: Value) -> None:
        self._announced.pop(name, None)
        with contextlib.suppress(KeyError):  # this router has not heard of the run
            self._plane.registry.newest.forget(name)
