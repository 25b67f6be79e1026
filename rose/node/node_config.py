"""The shape of NODE.yaml; `rose serve` builds the same engine configuration from its flags.

Values that parse are consistent with each other. Whether they fit the machine (ports, models) is for
checks.py.
"""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rose.config import Section
from rose.engine.settings import EngineSettings, pool_of_rank
from rose.memory.pool.pool_memory import MAX_SHARDS
from rose.memory.slabs.backend import BackendKind
from rose.ports import url_host
from rose.types import Role

NODE_EXAMPLE = """\
pool: {name: gpu0}
relay: embedded://127.0.0.1:8400
run: frozenlake
engines:
  - {model: ./models/chat, role: serving, port: 8000, slo_ttft_ms: 500, slo_tpot_ms: 100}
  - {model: ./models/policy, role: rollout, port: 8001, vllm_args: [--max-model-len, "2048"]}
"""


class PoolConfig(Section):
    """The KV memory that engines share on one GPU, or on those of engines with several ranks."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """The pool's name, as in `rose serve --pool NAME`."""
    num_slabs: Annotated[int, Field(gt=0)] | None = None
    """Slabs in the pool. None: as many as the models leave memory for."""
    slab_bytes: Annotated[int, Field(gt=0)] | None = None
    """The size of a slab. None: one that suits the models."""
    headroom_slabs: Annotated[int, Field(ge=0)] | None = None
    """Slabs kept free for serving's bursts. None: 20% of the slabs."""
    num_shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    """The ranks of each of its engines: tensor-parallel times pipeline-parallel size."""
    backend: BackendKind | None = None
    """Where the slabs are: in host memory, or shard i on the i-th visible GPU. None: cuda where the installed
    vLLM has a GPU to compute on, else host."""

    @model_validator(mode="after")
    def _headroom_fits(self) -> Self:
        headroom, num_slabs = self.headroom_slabs, self.num_slabs
        if headroom is not None and num_slabs is not None and headroom >= num_slabs:
            raise ValueError(
                f"headroom_slabs {self.headroom_slabs} leaves nothing of {self.num_slabs} slabs; use fewer"
            )
        return self


class EngineConfig(EngineSettings):
    """One vLLM engine on the GPU: where it listens, what vLLM is told, and its ROSE settings."""

    model: Annotated[str, Field(min_length=1)]
    """A model directory or hub id."""
    port: Annotated[int, Field(gt=0, lt=65536)]
    """The port that the engine listens on."""
    host: str = "127.0.0.1"
    """The address that the engine listens on."""
    vllm_args: tuple[str, ...] = ()
    """Flags for vLLM itself, as on its command line."""
    cpus: tuple[int, ...] | None = None
    """CPUs for the whole engine; ``compute_cpus`` pins the model's thread alone."""
    relay: str | None = None
    """The URL of the relay that brings new weights. None: no new weights come."""
    run: str | None = None
    """The trainer's run whose weights the engine follows over ``relay``; None: the only live run, or with
    ``adapters`` none."""
    adapters: tuple[str, ...] = ()
    """Runs of LoRA adapters that the engine follows over ``relay``. Turns name a run as their model."""
    staging: str | None = None
    """The folder for new weights from the relay. None: one in memory, which is removed at the end."""

    @model_validator(mode="after")
    def _weights_can_come(self) -> Self:
        if self.run is not None and self.relay is None:
            raise ValueError(f"run {self.run} needs a relay that brings it; set relay")
        if self.adapters and self.relay is None:
            raise ValueError(f"adapter {self.adapters[0]} needs a relay that brings it; set relay")
        given = {text.replace("_", "-") for text in self.vllm_args}
        if self.adapters and "--enable-lora" not in given:
            raise ValueError(
                f"adapter {self.adapters[0]}: vLLM holds adapters only with --enable-lora; add --enable-lora "
                "--max-lora-rank R --max-loras N, where N is two for each adapter, and one more on a CPU"
            )
        if self.relay is not None and not self.is_updated:
            raise ValueError(
                "relay: a serving engine follows one only with takes_weights true; set it, or leave relay out"
            )
        return self

    def vllm_flag(self, *names: str) -> str | None:
        """Returns the value of the last of vLLM's flags with one of these names, written with a space or
        with =."""
        found = None
        for index, argument in enumerate(self.vllm_args):
            name, equals, value = argument.partition("=")
            if name.replace("_", "-") in names:
                found = value if equals else next(iter(self.vllm_args[index + 1 : index + 2]), None)
        return found

    def vllm_count(self, *names: str) -> int:
        """Returns the number that a flag of vLLM gives, 1 without one. vLLM refuses what is no number when it
        starts."""
        given = self.vllm_flag(*names)
        return int(given) if given is not None and given.isdigit() and int(given) > 0 else 1

    @property
    def follows_run(self) -> bool:
        """Whether a subscriber gives it the whole weights of a run, and not adapters alone."""
        is_fed = self.is_updated and self.relay is not None
        return is_fed and (self.run is not None or not self.adapters)

    @property
    def num_gpus(self) -> int:
        """How many GPUs the engine computes on, where there are any."""
        return (
            self.vllm_count("--tensor-parallel-size", "-tp")
            * self.vllm_count("--pipeline-parallel-size", "-pp")
            * self.vllm_count("--prefill-context-parallel-size", "-pcp")
            * self.num_data_ranks
        )

    @property
    def num_data_ranks(self) -> int:
        """The number of its data-parallel ranks."""
        return self.vllm_count("--data-parallel-size", "-dp")

    @property
    def pools(self) -> tuple[str, ...]:
        """The pool of each data-parallel rank; empty without a pool."""
        names = (self.of_rank(rank).pool for rank in range(self.num_data_ranks))
        return tuple(name for name in names if name is not None)

    @property
    def listens_on(self) -> str | None:
        """Returns the host that vLLM listens on; None for a Unix socket."""
        if self.vllm_flag("--uds") is not None:
            return None
        return self.vllm_flag("--host") or self.host

    @property
    def name(self) -> str:
        """Returns its name in logs."""
        return f"{self.role}-{self.port}"

    @property
    def url(self) -> str:
        """Returns where it answers HTTP on this host, or HTTPS if vLLM has a certificate."""
        scheme = "http" if self.vllm_flag("--ssl-certfile") is None else "https"
        return f"{scheme}://{url_host(self.host)}:{self.port}"

    def plugin_settings(self) -> dict[str, Any]:
        """Returns the EngineSettings that the user set: the ``rose`` key of vLLM's --additional-config."""
        mine = set(EngineSettings.model_fields)
        return self.model_dump(mode="json", include=mine, exclude_unset=True)


class NodeConfig(Section):
    """NODE.yaml: one shared GPU with its pool and its engines."""

    pool: PoolConfig
    """The pool of all engines."""
    engines: Annotated[tuple[EngineConfig, ...], Field(min_length=1)]
    """The engines that share the GPU."""
    relay: str | None = None
    """The relay of the rollout engines, unless they name one of their own."""
    run: str | None = None
    """The run that the rollout engines follow, unless they name one of their own."""
    adapters: tuple[str, ...] = ()
    """The runs of LoRA adapters that the rollout engines follow, unless they name some of their own."""

    @model_validator(mode="before")
    @classmethod
    def _engines_inherit(cls, content: Any) -> Any:
        """Gives engines the node's pool, and rollout engines its relay, run and adapters, unless they
        have their own."""
        if not (isinstance(content, dict) and isinstance(content.get("engines"), list)):
            return content
        pool = content.get("pool")
        shared = {"pool": pool.get("name")} if isinstance(pool, dict) else {}
        keys = ("relay", "run", "adapters")
        weights = {key: content[key] for key in keys if content.get(key) is not None}
        engines = [
            {**shared, **(weights if each.get("role") == Role.ROLLOUT else {}), **each}
            if isinstance(each, dict)
            else each
            for each in content["engines"]
        ]
        return {**content, "engines": engines}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ports = [engine.port for engine in self.engines]
        twice = sorted({port for port in ports if ports.count(port) > 1})
        if twice:
            raise ValueError(f"engines share port {twice[0]}; give each engine its own")
        return self

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The pools of its engines' data-parallel ranks."""
        sharing = [engine.num_data_ranks for engine in self.engines if engine.pool == self.pool.name]
        return tuple(pool_of_rank(self.pool.name, rank) for rank in range(max(sharing, default=1)))

    def opened(self) -> Self:
        """Returns the node with engines that may listen beyond this machine without keys."""
        engines = tuple(engine.model_copy(update={"insecure": True}) for engine in self.engines)
        return self.model_copy(update={"engines": engines})
