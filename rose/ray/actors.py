"""A named set of services on a Ray cluster: a placement group, and the detached actors in it.

Either all services come up or none is left. A second `up` of the same name is refused, and `down` finds
whatever is there, even a part. No Ray cluster is started.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rose.errors import ConfigError, WorkerError
from rose.ray.process_actor import ProcessActor
from rose.ray.ray_config import NodeService, RayConfig, RelayService, RouterService, ServiceBundle

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where the services answer."""

    router_url: str | None
    relay_url: str | None
    workers: tuple[str, ...]


def connect(address: str) -> None:
    """Joins the Ray cluster at ``address``. Raises: ConfigError if there is none."""
    try:
        ray.init(address=address, namespace="rose", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--address {address}: no Ray cluster there ({reason}); run `ray start --head`"
        ) from error


def up(config: RayConfig, keys: Mapping[str, str], *, is_insecure: bool = False) -> Endpoints:
    """Places and starts all services; ``keys`` are variables for their processes, which without them listen
    only if ``is_insecure``.

    Raises: ConfigError if the name is taken or Ray has no room; WorkerError if a service does not start.
    """
    if names := _running(config.name):
        raise ConfigError(f"{config.name}: {', '.join(names)} up already; run: rose ray down {config.name}")
    services = config.services()
    group = _place(config, services)
    try:
        return _start(config, group, services, keys, is_insecure)
    except ray.exceptions.RayError as error:
        down(config.name)
        raise WorkerError(_cause(error)) from error
    except BaseException:  # on a signal too nothing may be left behind
        down(config.name)
        raise


def status(name: str) -> dict[str, dict[str, Any] | None]:
    """Asks each service's actor for its status; None where it does not answer."""
    told: dict[str, dict[str, Any] | None] = {}
    for service in _running(name):
        try:
            actor = ray.get_actor(service, namespace=_namespace(name))
            told[service] = ray.get(actor.status.remote(), timeout=STATUS_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError):
            told[service] = None
    return told


def num_placed(name: str) -> int:
    """Counts the services that were placed, including those whose actor has died since."""
    try:
        table = ray.util.placement_group_table(ray.util.get_placement_group(_namespace(name)))
    except ValueError:
        return 0
    return len(table["bundles"]) if table["state"] != "REMOVED" else 0


def down(name: str) -> list[str]:
    """Stops all services of that name, the router first; returns their names once they are gone."""
    names = _running(name)
    actors = [ray.get_actor(service, namespace=_namespace(name)) for service in names]
    for service, actor in zip(names, actors, strict=True):
        try:
            ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            logger.warning("no clean stop service=%s error=%s", service, _cause(error))
        ray.kill(actor)  # its processes end with it
    try:
        remove_placement_group(ray.util.get_placement_group(_namespace(name)))
    except ValueError:
        logger.debug("no placement group name=%s", name)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while _running(name) or num_placed(name):
        if time.monotonic() >= deadline_s:
            raise WorkerError(f"{name}: {_running(name)} still there after {STOP_TIMEOUT_S:.0f} s; try again")
        time.sleep(POLL_S)
    return names


def _start(
    config: RayConfig,
    group: PlacementGroup,
    services: Mapping[str, ServiceBundle],
    keys: Mapping[str, str],
    is_insecure: bool,
) -> Endpoints:
    actors = {
        name: _actor(config.name, name, service, group, index, keys, is_insecure)
        for index, (name, service) in enumerate(services.items())
    }
    relay_url: str | None = None
    if isinstance(relay := services.get("relay"), RelayService):
        relay_url = ray.get(actors["relay"].start_relay.remote(relay.config.model_dump()))
    nodes = [
        actors[name].start_node.remote(service.config.model_dump(mode="json", exclude_unset=True), relay_url)
        for name, service in services.items()
        if isinstance(service, NodeService)
    ]
    workers = [worker for told in ray.get(nodes) for worker in told]
    router_url: str | None = None
    if isinstance(router := services.get("router"), RouterService):
        content = router.config.model_dump(mode="json", exclude_unset=True)
        router_url = ray.get(actors["router"].start_router.remote(content, workers))
    urls = tuple(worker["url"] for worker in workers)
    return Endpoints(router_url=router_url, relay_url=relay_url, workers=urls)


def _place(config: RayConfig, services: Mapping[str, ServiceBundle]) -> PlacementGroup:
    """Reserves the services' resources. Raises: ConfigError if the cluster has no room for them."""
    bundles = [service.bundle() for service in services.values()]
    group = placement_group(
        bundles, strategy=config.strategy, name=_namespace(config.name), lifetime="detached"
    )
    if not group.wait(PLACE_TIMEOUT_S):
        remove_placement_group(group)
        asked = ", ".join(f"{name} {service.bundle()}" for name, service in services.items())
        free = [_shown(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        raise ConfigError(
            f"{config.name}: no room within {PLACE_TIMEOUT_S:.0f} s for {asked} with strategy "
            f"{config.strategy}; the nodes have {free} in all, part of which others may be using"
        )
    return group


def _actor(
    cluster: str,
    name: str,
    service: ServiceBundle,
    group: PlacementGroup,
    index: int,
    keys: Mapping[str, str],
    is_insecure: bool,
) -> Any:
    """Starts an actor in its bundle of the group; its second thread answers while the first is busy."""
    options = {
        "name": name,
        "namespace": _namespace(cluster),
        "lifetime": "detached",
        "num_cpus": service.num_cpus,
        "num_gpus": service.num_gpus,
        "resources": service.resources,
        "max_concurrency": 2,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }
    return ray.remote(ProcessActor).options(**options).remote(f"{cluster}-{name}", dict(keys), is_insecure)


def _running(name: str) -> list[str]:
    """The names of the services that are up, in the order in which they are stopped."""
    namespace = _namespace(name)
    named = ray.util.list_named_actors(all_namespaces=True)
    found = {each["name"] for each in named if each["namespace"] == namespace}
    return sorted(found, reverse=True)


def _namespace(name: str) -> str:
    return f"rose-{name}"


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith("node:")}


def _cause(error: Exception) -> str:
    """Extracts what went wrong in the actor, without Ray's traceback."""
    cause = getattr(error, "cause", None)
    return str(cause if cause is not None else error)
