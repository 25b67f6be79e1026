"""Settings and configuration files. This is the only module that reads the environment.

A bad value raises a ConfigError, one line with the file, the key and the fix. What is returned never changes.
There are no globals: each process's entry point makes its Settings once and hands them down.
"""

import difflib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rose.errors import ConfigError, FolderError

Model = TypeVar("Model", bound=BaseModel)
SHARE_FILES = (
    "a subscriber in another container must see the same files as the engine: start both with --ipc=host, "
    "which shares /dev/shm, or mount one volume in both as the folder of its --staging"
)
"""What to do where an engine finds no file at the path that it was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that a process reads from its environment."""

    runtime_dir: Path
    """The folder for the sockets of this host's pools (ROSE_RUNTIME_DIR)."""
    cache_dir: Path
    """The folder for step-time profiles and other files that can be made again (ROSE_CACHE_DIR)."""
    state_dir: Path
    """The folder for what has to outlast a reboot (ROSE_STATE_DIR)."""
    key: str | None = None
    """The bearer key of the workers' /rose/v1 routes and of the relay (ROSE_KEY); None leaves them open."""
    read_key: str | None = None
    """The relay's key for followers, which allows only reading and acknowledging (ROSE_READ_KEY)."""
    signing_key: str | None = None
    """The trainer's Ed25519 key, with which it signs what it publishes (ROSE_SIGNING_KEY)."""
    public_key: str | None = None
    """The public half of the trainer's key; followers that have it refuse what it did not sign
    (ROSE_PUBLIC_KEY)."""
    admin_key: str | None = None
    """The bearer key of the router's admin routes (ROSE_ROUTER_ADMIN_KEY)."""
    member_key: str | None = None
    """The bearer key of the router's /workers alone (ROSE_ROUTER_MEMBER_KEY)."""
    router_api_key: str | None = None
    """The bearer key that clients of the router need on /v1 (ROSE_ROUTER_API_KEY)."""
    router_url: str | None = None
    """Where a job's trainer finds its routers (ROSE_ROUTER_URL); the job scheduler sets it."""
    dashboard_key: str | None = None
    """The key of the job scheduler's dashboard (ROSE_DASHBOARD_KEY); None leaves it open."""
    worker_api_key: str | None = None
    """The bearer key that workers want on /v1, vLLM's --api-key (ROSE_WORKER_API_KEY)."""
    tls_ca: Path | None = None
    """Certificates in PEM, of which routers and engines show one (ROSE_TLS_CA); None: the system's."""
    channel: str | None = None
    """The cluster scheduler's control channel (ROSE_CHANNEL); None for this user's own on this host."""
    job_file: Path | None = None
    """The job file of a job's process (ROSE_JOB); the runner sets it, users don't."""
    front_secret: str | None = None
    """A router's secret for its own fronts (ROSE_FRONT_SECRET); the router sets it, users don't."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads the environment; an empty variable counts as unset."""
        variables = environ if environ is not None else os.environ
        home = Path(variables.get("HOME") or "~").expanduser()
        return cls(
            runtime_dir=_runtime_dir(variables),
            cache_dir=Path(variables.get("ROSE_CACHE_DIR") or home / ".cache" / "rose"),
            state_dir=_state_dir(variables, home),
            key=variables.get("ROSE_KEY") or None,
            read_key=variables.get("ROSE_READ_KEY") or None,
            signing_key=variables.get("ROSE_SIGNING_KEY") or None,
            public_key=variables.get("ROSE_PUBLIC_KEY") or None,
            admin_key=variables.get("ROSE_ROUTER_ADMIN_KEY") or None,
            member_key=variables.get("ROSE_ROUTER_MEMBER_KEY") or None,
            router_api_key=variables.get("ROSE_ROUTER_API_KEY") or None,
            router_url=variables.get("ROSE_ROUTER_URL") or None,
            dashboard_key=variables.get("ROSE_DASHBOARD_KEY") or None,
            worker_api_key=variables.get("ROSE_WORKER_API_KEY") or None,
            tls_ca=Path(variables["ROSE_TLS_CA"]) if variables.get("ROSE_TLS_CA") else None,
            channel=variables.get("ROSE_CHANNEL") or None,
            job_file=Path(variables["ROSE_JOB"]) if variables.get("ROSE_JOB") else None,
            front_secret=variables.get("ROSE_FRONT_SECRET") or None,
        )

    def key_variables(self) -> dict[str, str]:
        """Returns the keys, and where the trusted certificates are, as variables for a process on another
        host."""
        named = {
            "ROSE_KEY": self.key,
            "ROSE_READ_KEY": self.read_key,
            "ROSE_PUBLIC_KEY": self.public_key,
            "ROSE_ROUTER_ADMIN_KEY": self.admin_key,
            "ROSE_ROUTER_MEMBER_KEY": self.member_key,
            "ROSE_ROUTER_API_KEY": self.router_api_key,
            "ROSE_WORKER_API_KEY": self.worker_api_key,
            "ROSE_TLS_CA": str(self.tls_ca) if self.tls_ca is not None else None,
        }
        return {name: key for name, key in named.items() if key is not None}

    @property
    def follower_key(self) -> str | None:
        """Returns the key with which a follower reads the relay."""
        return self.read_key if self.read_key is not None else self.key

    @property
    def profile_dir(self) -> Path:
        """Returns where `rose profile` keeps its step-time profiles."""
        return self.cache_dir / "profiles"

    @property
    def channel_url(self) -> str:
        """Returns the control channel that `rose sched` uses unless a command names another."""
        return self.channel if self.channel is not None else f"unix:{self.runtime_dir / 'sched'}"

    def pool_socket(self, pool: str) -> Path:
        """Returns the Unix socket of the daemon that owns ``pool``."""
        return self.runtime_dir / f"pool-{pool}.sock"

    def make_runtime_dir(self) -> Path:
        """Makes the runtime directory for this user alone. Raises: ConfigError if another user owns it."""
        return make_private_dir(self.runtime_dir, "set ROSE_RUNTIME_DIR to another one")

    @property
    def staging_root(self) -> Path:
        """Returns the folder where this user's engines find new weights: in memory if the host allows it."""
        shared = Path("/dev/shm")
        return shared / f"rose-{os.getuid()}" if os.access(shared, os.W_OK) else self.runtime_dir


def make_private_dir(path: Path, fix: str) -> Path:
    """Makes a folder for this user alone, because memory and weights pass through it.

    Raises: ConfigError, which ends with ``fix``, if another user owns the folder or may write to it; its
    subclass FolderError if the folder can't be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{path}: the folder can't be made ({error.strerror}); {fix}") from error
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"{path}: belongs to uid {status.st_uid}, not {os.getuid()}; {fix}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: others may write to it ({stat.filemode(status.st_mode)}); {fix}")
    return path


def launched_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Returns this process's rank and the number of ranks, as torchrun sets them; None if it has none.

    Raises: ConfigError.
    """
    variables = environ if environ is not None else os.environ
    rank, num_ranks = variables.get("RANK"), variables.get("WORLD_SIZE")
    if rank is None or num_ranks is None:
        return None
    if not (rank.isdecimal() and num_ranks.isdecimal() and int(rank) < int(num_ranks)):
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={num_ranks}: expected a rank from 0 to WORLD_SIZE - 1")
    return int(rank), int(num_ranks)


def devices_of_rank(rank: int, size: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process that sees the GPUs of a data-parallel rank alone: ``size`` of
    those that this process sees."""
    variables = environ if environ is not None else os.environ
    numbers = range(rank * size, (rank + 1) * size)
    given = variables.get("CUDA_VISIBLE_DEVICES", "")
    seen = given.split(",") if given else [str(number) for number in range(numbers.stop)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[number] for number in numbers if number < len(seen))}


_NO_DEVICE = ("-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES that name no GPU. CUDA hides what comes after one, too."""


def visible_devices(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None if it hides none."""
    given = (environ if environ is not None else os.environ).get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    names = [each.strip() for each in given.split(",")]
    return [each for each in takewhile(lambda name: name not in _NO_DEVICE, names) if each]


def mps_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder with the pipes of CUDA's MPS server, whether there is one or not."""
    variables = environ if environ is not None else os.environ
    return Path(variables.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the inherited environment plus ``extra``, for a child process."""
    return {**os.environ, **(extra if extra is not None else {})}


def forget_variables(prefix: str) -> None:
    """Removes all variables of this name or prefix, so that child processes don't inherit them."""
    for name in [each for each in os.environ if each.startswith(prefix)]:
        del os.environ[name]


def search_path(first: Path) -> str:
    """Returns PATH with ``first`` before all other folders, for a child process."""
    return os.pathsep.join([str(first), os.environ.get("PATH", os.defpath)])


def default_variable(name: str, value: str) -> None:
    """Sets a variable of this process unless the operator has set it.

    It is meant for libraries that only their environment configures; call it before the library is imported.
    """
    os.environ.setdefault(name, value)


def vllm_plugins() -> str:
    """Returns VLLM_PLUGINS for an engine: the plugins that it would load anyway, and rose. vLLM loads an
    endpoint plugin only if the variable names it, and other plugins if the variable names them or is unset.
    To name rose alone would therefore turn off the host's other plugins.
    """
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None:
        names = {name for name in named.split(",") if name}
    else:
        groups = [group for group in entry_points().groups if group.startswith("vllm.")]
        others = [group for group in groups if group != "vllm.endpoint_plugins"]
        names = {entry.name for group in others for entry in entry_points(group=group)}
    return ",".join(sorted(names | {"rose"}))


def vllm_targets_cpu() -> bool:
    """Returns whether vLLM was told to compute on CPUs, whatever build it is."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu"


def worker_api_key() -> str | None:
    """Returns the key that an engine of this host wants on /v1, as vLLM itself reads it or as the router
    sends it."""
    return os.environ.get("VLLM_API_KEY") or os.environ.get("ROSE_WORKER_API_KEY") or None


def _runtime_dir(variables: Mapping[str, str]) -> Path:
    if variables.get("ROSE_RUNTIME_DIR"):
        return Path(variables["ROSE_RUNTIME_DIR"])
    if variables.get("XDG_RUNTIME_DIR"):
        return Path(variables["XDG_RUNTIME_DIR"]) / "rose"
    return Path(f"/tmp/rose-{os.getuid()}")


def _state_dir(variables: Mapping[str, str], home: Path) -> Path:
    if variables.get("ROSE_STATE_DIR"):
        return Path(variables["ROSE_STATE_DIR"])
    return Path(variables.get("XDG_STATE_HOME") or home / ".local" / "state") / "rose"


class Section(BaseModel):
    """A part of a configuration file: unknown keys are errors, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Reads a file into ``model``. Raises: ConfigError, one line with file, key and fix."""
    return parse_config(read_yaml(path, model), model, str(path))


def read_yaml(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    """Reads the keys of a file that is meant for ``model``, unchecked. Raises: ConfigError."""
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

    ``source`` names it in errors. ``spelling`` turns a key into what the user wrote, such as a flag.
    Raises: ConfigError.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # An unknown key comes first: a missing one is often its correct spelling.
        errors = sorted(_own_errors(error.errors()), key=lambda each: each["type"] != "extra_forbidden")
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ConfigError(f"{source}: {_explain(errors[0], model, spelling)}{more}") from error


def _own_errors(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Returns the errors without those of a list that only seems too short because an item of it is wrong."""
    wrong = {each["loc"][:depth] for each in errors for depth in range(len(each["loc"]))}
    return [each for each in errors if each["type"] != "too_short" or each["loc"] not in wrong]


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
    if error["type"] in ("model_type", "dict_type"):
        return f"{key}: expected keys with values, such as KEY: VALUE, got {error['input']!r}"
    if error["type"] in ("list_type", "tuple_type"):
        return f"{key}: expected a list, such as [A, B], got {error['input']!r}"
    if error["type"] == "too_short":
        return f"{key}: expected at least {error['ctx']['min_length']}, got {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def _dotted(location: list[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def _section(model: type[BaseModel], location: list[int | str]) -> type[BaseModel]:
    """Returns the model that describes the section at ``location``."""
    is_key = False
    """Whether the next part is a key that the user has chosen, such as a team's name."""
    for part in location:
        if isinstance(part, int) or is_key:
            is_key = False
            continue
        annotation = model.model_fields[part].annotation
        is_key = any(get_origin(each) is dict for each in (annotation, *get_args(annotation)))
        model = next(_models_in(annotation))
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the models that a field's annotation names, such as those of a dict's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)
