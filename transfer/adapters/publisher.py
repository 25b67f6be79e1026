"""The publisher of a LoRA adapter: a run whose versions are the adapter alone.

Owns which tensors of a model are the adapter's, and their names in the relay: those of PEFT's files. The
adapter's configuration goes with the run's layout, so it is signed where the run is. Everything else is
the publisher of whole weights: exact deltas, snapshots, several trainer ranks, acknowledgements.
"""

from collections.abc import Mapping
from typing import Any

from rose.transfer.adapters.description import adapter_name, describe, pairs, published_name
from rose.transfer.format.manifest import AdapterBody
from rose.transfer.publish.publisher import WeightPublisher

PEFT_NAME = "default"
"""How PEFT names the only adapter of a model."""

_UNPUBLISHED = ("lora_embedding_A", "lora_embedding_B", "modules_to_save")


class AdapterPublisher(WeightPublisher):
    """Publishes a trainer's LoRA adapter as a run of versions 0, 1, 2, ...

    model: a PEFT model, or a mapping or pairs of (name, tensor) as PEFT saves or names them. They are read
    again at each publish(). config: PEFT's adapter_config.json; None: the model's own. base: the base model's
    name as engines serve it; None: the one in the configuration. peft_name: the adapter's name in the model.
    options: those of WeightPublisher. Turns name the run as their model. Raises: ValueError naming the key or
    the tensor; what WeightPublisher raises.
    """

    def __init__(
        self,
        model: Any,
        relay_url: str,
        run_id: str,
        *,
        config: Mapping[str, Any] | None = None,
        base: str | None = None,
        peft_name: str = PEFT_NAME,
        **options: Any,
    ) -> None:
        given = config if config is not None else _own_config(model, peft_name)
        self.adapter: AdapterBody = describe(given, base)
        tensors = _adapter_tensors(model, peft_name)
        super().__init__(tensors, relay_url, run_id, adapter=self.adapter, **options)
        try:
            pairs(self.layout.tensors, self.adapter)
        except ValueError as error:
            self.close()
            raise ValueError(f"the adapter of run {run_id}: {error}") from error


def _own_config(model: Any, peft_name: str) -> Mapping[str, Any]:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        raise ValueError(
            "config is missing: the model is no PEFT model, so pass adapter_config.json's content"
        )
    if peft_name not in configs:
        raise ValueError(f"the model has no adapter {peft_name!r}; it has {', '.join(sorted(configs))}")
    own: Mapping[str, Any] = configs[peft_name].to_dict()
    return own


def _adapter_tensors(model: Any, peft_name: str) -> list[tuple[str, Any]]:
    """Returns the adapter's live tensors by the names of PEFT's files. Raises: ValueError."""
    if hasattr(model, "state_dict"):
        named = list(model.state_dict(keep_vars=True).items())
        named = [(name, tensor) for name, tensor in named if adapter_name(name) in (None, peft_name)]
        found = [(published_name(name), tensor) for name, tensor in named]
        tensors = [(name, tensor) for name, tensor in found if name is not None]
        others = tuple(f".{part}.{peft_name}" for part in _UNPUBLISHED)
        if more := [name for name, _ in named if any(part in name for part in others)]:
            raise ValueError(
                f"{more[0]} would be lost: only lora_A and lora_B of linear layers are published"
            )
    else:
        given = list(model.items()) if isinstance(model, Mapping) else list(model)
        found = [(published_name(name), tensor) for name, tensor in given]
        for (name, _), (known, _) in zip(given, found, strict=True):
            if known is None:
                raise ValueError(f"{name} is no lora_A or lora_B tensor: only an adapter can be published")
        tensors = [(name, tensor) for name, tensor in found if name is not None]
    if not tensors:
        raise ValueError(f"no lora_A or lora_B tensor of adapter {peft_name!r} in the model")
    return tensors
