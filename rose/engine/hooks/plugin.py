"""The entry point of the ``vllm.general_plugins`` group, which runs in every vLLM process.

Owns the registration with vLLM. The top of the module imports little: vLLM logs and skips a plugin whose
import fails, so whatever can fail does so inside :func:`register`, with a clear message.
"""

import logging

from rose.engine.amx import ask_for_amx
from rose.engine.vllm_version import has_sleep_backends, is_supported, supported_range, vllm_version

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes vLLM understand ``--additional-config '{"rose": {...}}'``.

    Under an unsupported vLLM, engines without the ``rose`` key work as ever. An engine with the key is
    refused when its configuration is built (patches.py).
    """
    from rose.engine.hooks import patches

    patches.configure_from_additional_config()
    version = vllm_version()
    if not is_supported(version):
        logger.warning("rose is inactive: vllm=%s supported=%s", version, supported_range())
        return
    log_beside_vllm()
    ask_for_amx()
    patches.give_scheduler_its_core()
    patches.tell_scheduler_of_waves()
    register_weight_backends()
    _register_sleep_backend()


def log_beside_vllm() -> None:
    """Sends ROSE's log to vLLM's handlers. vLLM sets up its own logger only, so INFO lines would be lost.

    Does nothing while vLLM has none. In an API server vLLM sets them up after the plugins, so that the routes
    call this once more (endpoint.py).
    Handlers of the root logger do not count: a dependency may have added one for warnings.
    """
    ours, theirs = logging.getLogger("rose"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def register_weight_backends() -> None:
    """Makes ``rose`` a weight-transfer backend of engines, and of trainers if this vLLM has those."""
    from vllm.distributed.weight_transfer import factory

    # register() may run several times in a process, and a second registration raises.
    if "rose" not in factory.WeightTransferEngineFactory._registry:
        engine = ("rose.engine.weights.weights", "StagedWeightEngine")
        factory.WeightTransferEngineFactory.register_engine("rose", *engine)
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is not None and "rose" not in trainers._registry:
        trainers.register_engine("rose", "rose.engine.weights.trainer_backend", "RelayTrainerEngine")


def _register_sleep_backend() -> None:
    if not has_sleep_backends():
        return  # activation.py then refuses to deactivate the engine
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    if "rose" not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend("rose", "rose.engine.weights.sleep", "HostWeightsBackend")
