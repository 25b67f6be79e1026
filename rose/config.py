"""Settings, and the reading of configuration files: the only reader of the environment.

Owns: the names of ROSE's environment variables, and the wording of what is wrong with a file.
Promises: a bad value raises ConfigError with one line that names the file, the key and the fix; what is
returned never changes afterwards.
Never: keeps a global. Each process's entry point builds its Settings once and hands them down.
"""

import difflib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rose.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

DELTA_LIBRARY = Path(__file__).with_name("librose_delta_cuda.so")
"""Where `make cuda` puts the kernels; nobody has to build them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process takes from its environment."""

    runtime_dir: Path
    """Sockets of this host's pools (ROSE_RUNTIME_DIR)."""
    cache_dir: Path
    """Cost profiles and other things that may be rebuilt (ROSE_CACHE_DIR)."""
    key: str | None = None
    """Bearer key of the workers' /rose/v1 routes and of the relay (ROSE_KEY); None leaves them open."""
    admin_key: str | None = None
    """Bearer key of the router's admin routes (ROSE_ROUTER_ADMIN_KEY)."""
    router_api_key: str | None = None
    """Bearer key that the router asks of its clients on /v1 (ROSE_ROUTER_API_KEY)."""
    worker_api_key: str | None = None
    """Bearer key that workers ask for on /v1, vLLM's --api-key (ROSE_WORKER_API_KEY)."""
    channel: str | None = None
    """Control channel of the cluster scheduler (ROSE_CHANNEL); None: this user's own, on this host."""
    job_file: Path | None = None
    """What a job's process was started for (ROSE_JOB): set by the runner, not by users."""
    delta_library: Path = DELTA_LIBRARY
    """The delta codec's CUDA kernels, as `make cuda` builds them (ROSE_DELTA_LIBRARY)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads the environment; an empty variable counts as unset."""
        variables = environ if environ is not None else os.environ
        home = Path(variables.get("HOME") or "~").expanduser()
        return cls(
            runtime_dir=_runtime_dir(variables),
            cache_dir=Path(variables.get("ROSE_CACHE_DIR") or home / ".cache" / "rose"),
            key=variables.get("ROSE_KEY") or None,
            admin_key=variables.get("ROSE_ROUTER_ADMIN_KEY") or None,
            router_api_key=variables.get("ROSE_ROUTER_API_KEY") or None,
            worker_api_key=variables.get("ROSE_WORKER_API_KEY") or None,
            channel=variables.get("ROSE_CHANNEL") or None,
            job_file=Path(variables["ROSE_JOB"]) if variables.get("ROSE_JOB") else None,
            delta_library=Path(variables.get("ROSE_DELTA_LIBRARY") or DELTA_LIBRARY),
        )

    def key_variables(self) -> dict[str, str]:
        """The keys as variables for a process on another host."""
        named = {
            "ROSE_KEY": self.key,
            "ROSE_ROUTER_ADMIN_KEY": self.admin_key,
            "ROSE_ROUTER_API_KEY": self.router_api_key,
            "ROSE_WORKER_API_KEY": self.worker_api_key,
        }
        return {name: key for name, key in named.items() if key is not None}

    @property
    def profile_dir(self) -> Path:
        """Where `rose profile` keeps its step-time profiles."""
        return self.cache_dir / "profiles"

    @property
    def channel_url(self) -> str:
        """The control channel that `rose sched` uses unless a command names another."""
        return self.channel if self.channel is not None else f"unix:{self.runtime_dir / 'sched'}"

    def pool_socket(self, pool: str) -> Path:
        """The unix socket of the daemon that owns ``pool``."""
        return self.runtime_dir / f"pool-{pool}.sock"

    def make_runtime_dir(self) -> Path:
        """Creates the runtime directory, for this user only. Raises: ConfigError if it is somebody else's."""
        return make_private_dir(self.runtime_dir, "set ROSE_RUNTIME_DIR to another one")

    @property
    def staging_root(self) -> Path:
        """Where engines of this user find new weights: in memory where the host allows it."""
        shared = Path("/dev/shm")
        return shared / f"rose-{os.getuid()}" if os.access(shared, os.W_OK) else self.runtime_dir


def make_private_dir(path: Path, fix: str) -> Path:
    """Creates a folder for this user only: memory and weights pass through it.

    Raises: ConfigError, ending with ``fix``, if it exists and somebody else owns it or may write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"{path}: belongs to uid {status.st_uid}, not {os.getuid()}; {fix}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: others may write to it ({stat.filemode(status.st_mode)}); {fix}")
    return path


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The inherited environment plus ``extra``, for a child process."""
    return {**os.environ, **(extra if extra is not None else {})}


def default_variable(name: str, value: str) -> None:
    """Sets a variable of this process unless the operator has set it.

    For libraries that are configured by their environment alone; call before the library is imported.
    """
    os.environ.setdefault(name, value)


def vllm_plugins() -> str:
    """VLLM_PLUGINS for an engine: what it would load anyway, plus rose.

    vLLM loads an endpoint plugin only when the variable names it, and everything else only when the variable
    is unset or names it; so naming rose alone would silently turn off the host's other plugins.
    """
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None:
        names = {name for name in named.split(",") if name}
    else:
        groups = [group for group in entry_points().groups if group.startswith("vllm.")]
        others = [group for group in groups if group != "vllm.endpoint_plugins"]
        names = {entry.name for group in others for entry in entry_points(group=group)}
    return ",".join(sorted(names | {"rose"}))


def _runtime_dir(variables: Mapping[str, str]) -> Path:
    if variables.get("ROSE_RUNTIME_DIR"):
        return Path(variables["ROSE_RUNTIME_DIR"])
    if variables.get("XDG_RUNTIME_DIR"):
        return Path(variables["XDG_RUNTIME_DIR"]) / "rose"
    return Path(f"/tmp/rose-{os.getuid()}")


class Section(BaseModel):
    """A part of a configuration file: unknown keys are errors, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Reads ``path`` into ``model``. Raises: ConfigError, one line with file, key and fix."""
    return parse_config(read_yaml(path, model), model, str(path))


def read_yaml(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    """The keys of a file that is meant for ``model``, unchecked. Raises: ConfigError."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys {', '.join(model.model_fields)} at the top level")
    return content


def parse_config(
    content: Mapping[str, Any], model: type[Model], source: str, spelling: Callable[[str], str] = str
) -> Model:
    """Checks ``content`` against ``model``.

    source: names it in the error. spelling: turns a key into what the user wrote, e.g. a flag.
    Raises: ConfigError.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # An unknown key first: a missing one is often just its correct spelling.
        errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ConfigError(f"{source}: {_explain(errors[0], model, spelling)}{more}") from error


def _explain(error: ErrorDetails, model: type[BaseModel], spelling: Callable[[str], str]) -> str:
    location = list(error["loc"])
    key = spelling(_dotted(location)) if location else ""
    if error["type"] == "extra_forbidden":
        known = list(_section(model, location[:-1]).model_fields)
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        fix = f"did you mean {spelling(close[0])}?" if close else f"known keys: {', '.join(known)}"
        return f"{key}: unknown key; {fix}"
    if error["type"] == "missing":
        return f"{key}: missing; add it"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def _dotted(location: list[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _section(model: type[BaseModel], location: list[int | str]) -> type[BaseModel]:
    """The model that describes the section at ``location``."""
    for part in location:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            candidates = [annotation, *get_args(annotation)]
            model = next(
                each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)
            )
    return model
