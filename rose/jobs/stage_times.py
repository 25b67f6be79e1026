"""`rose sched profile-stages`: what one sequence costs on each stage of a pipeline, forward and backward.

Runs a real model in this process, with its layers divided evenly into stages, and times the stages' borders.
Promises that every stage is timed alone, so that one device is enough to profile a node of several. Never
updates weights.
Source: LeMix §IV-A.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.arguments import CommandParser, check_output, model_name, positive_int
from rose.errors import ConfigError
from rose.jobs.slowdown import cpu_name
from rose.scheduler.node.model import NodeProfile, PassCost, Stage
from rose.scheduler.node.profile import fit_cost, write_profile

if TYPE_CHECKING:
    import torch

LENGTHS = (32, 64, 128, 256, 512)
REPEATS = 5
_ADAM_BYTES = 12
"""A parameter takes these beside itself: two moments and a master copy in single precision."""


@dataclass(slots=True, kw_only=True)
class StageSamples:
    """Seconds of one stage by length."""

    forward: dict[int, list[float]] = field(default_factory=dict)
    backward: dict[int, list[float]] = field(default_factory=dict)
    activation_bytes: dict[int, int] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Measures, prints the fit of each stage, and writes the file."""
    parser = CommandParser(
        "rose sched profile-stages",
        "Measures a model's forward and backward passes by stage, for rose sched simulate --level node.",
        "rose sched profile-stages ./model --stages 2 -o stages.json",
    )
    parser.add_argument(
        "model", type=model_name, metavar="MODEL", help="a Hugging Face model: its folder or its name"
    )
    parser.add_argument(
        "--stages",
        type=positive_int,
        default=2,
        metavar="N",
        help="pipeline stages, one for each GPU of a node (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=positive_int,
        nargs="+",
        default=list(LENGTHS),
        metavar="TOKENS",
        help=f"lengths of the measured inputs, at least three (default: {' '.join(map(str, LENGTHS))})",
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=REPEATS,
        help="measurements of each length; the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the profile to write"
    )
    arguments = parser.parse_args(list(argv))
    if len(set(arguments.lengths)) < 3:
        raise ConfigError(
            f"--lengths: three coefficients need at least 3 different lengths, got {arguments.lengths}"
        )
    check_output(arguments.output, may_exist=True)
    profile, errors = _profile(arguments)
    write_profile(profile, arguments.output)
    print(f"{profile.model} on {profile.hardware}: seconds = a + b tokens + c tokens^2")
    for index, (stage, error) in enumerate(zip(profile.stages, errors, strict=True)):
        for name, cost in (("forward", stage.forward), ("backward", stage.backward)):
            print(
                f"  stage {index} {name:<8} a {cost.constant_s:.3g}  b {cost.per_token_s:.3g}  "
                f"c {cost.per_pair_s:.3g}  median error {error[name]:.0%}"
            )
        print(
            f"  stage {index} memory   KV {stage.kv_token_bytes} bytes a token, activations of training "
            f"{stage.activation_token_bytes}"
        )
    print(f"written to {arguments.output}")
    return 0


def _profile(arguments: argparse.Namespace) -> tuple[NodeProfile, list[dict[str, float]]]:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise ConfigError(f"--device {arguments.device}: no device of torch; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {arguments.device}: only cpu and cuda can be measured")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {arguments.device}: torch sees no CUDA device here; use --device cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(arguments.model).to(device)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{arguments.model}: not a causal language model ({error})") from error
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and max(arguments.lengths) > most:
        raise ConfigError(
            f"--lengths {max(arguments.lengths)}: {arguments.model} takes at most {most} tokens"
        )
    samples = measure(model, arguments.stages, arguments.lengths, arguments.repeats)
    free_bytes = _free_bytes(model, device, arguments.stages)
    stages, errors = [], []
    for one, num_layers in zip(samples, _layer_counts(model, arguments.stages), strict=True):
        forward, backward = _fitted(one.forward), _fitted(one.backward)
        longest = max(one.activation_bytes)
        stages.append(
            Stage(
                forward=forward,
                backward=backward,
                kv_token_bytes=num_layers * _kv_bytes(model),
                activation_token_bytes=max(1, one.activation_bytes[longest] // longest),
                free_bytes=free_bytes,
            )
        )
        errors.append({"forward": _error(forward, one.forward), "backward": _error(backward, one.backward)})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return NodeProfile(model=str(arguments.model), hardware=name, stages=tuple(stages)), errors


def measure(
    model: "torch.nn.Module", num_stages: int, lengths: Sequence[int], repeats: int
) -> list[StageSamples]:
    """Times each stage at each length, after one pass to warm up.

    Forward passes run without gradients, as in serving. Backward passes begin at the language-model loss.
    Raises: ConfigError if the model has fewer layers than stages.
    """
    borders = _Borders(model, num_stages)
    try:
        for length in lengths:
            for repeat in range(-1, repeats):
                borders.sample(length, keeps=repeat >= 0)
    finally:
        borders.close()
    return borders.samples


class _Borders:
    """Hooks at the first layer of each stage that note when a pass comes by."""

    def __init__(self, model: "torch.nn.Module", num_stages: int) -> None:
        self._model = model
        self.samples = [StageSamples() for _ in range(num_stages)]
        layers, first, hooks = _layers(model), 0, []
        for stage, count in enumerate(_layer_counts(model, num_stages)):
            if stage:
                hooks.append(layers[first].register_forward_pre_hook(self._passed, with_kwargs=True))
            first += count
        self._hooks = hooks
        self._stamps: list[float] = []
        self._backward: list[float] = []
        self._stage = 0
        self._saved: list[dict[int, int]] = []
        self._weights = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def sample(self, length: int, *, keeps: bool) -> None:
        """Runs one forward pass without gradients, and one with them and backward."""
        import torch

        parameter = next(self._model.parameters())
        tokens = torch.randint(0, self._model.config.vocab_size, (1, length), device=parameter.device)  # type: ignore[union-attr,arg-type]
        with torch.no_grad():
            forward = self._forward(tokens)[0]
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            _, loss = self._forward(tokens)
        self._backward = [self._now()]
        loss.backward()  # type: ignore[no-untyped-call]
        self._backward.append(self._now())
        backward = _gaps(self._backward)[::-1]
        self._model.zero_grad(set_to_none=True)
        if not keeps:
            return
        for one, ahead_s, back_s, saved in zip(self.samples, forward, backward, self._saved, strict=True):
            one.forward.setdefault(length, []).append(ahead_s)
            one.backward.setdefault(length, []).append(back_s)
            one.activation_bytes[length] = sum(saved.values())

    def _forward(self, tokens: "torch.Tensor") -> tuple[list[float], "torch.Tensor"]:
        self._stage, self._saved = 0, [{} for _ in self.samples]
        self._stamps = [self._now()]
        loss = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self._stamps.append(self._now())
        return _gaps(self._stamps), loss

    def _passed(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stamps.append(self._now())
        self._stage += 1
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._backward.append(self._now()))

    def _save(self, tensor: "torch.Tensor") -> "torch.Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._saved[self._stage][storage.data_ptr()] = storage.nbytes()
        return tensor

    def _now(self) -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def _gaps(stamps: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(stamps)]


def _layers(model: "torch.nn.Module") -> "torch.nn.ModuleList":
    """Returns the decoder's layers: the longest list of modules."""
    import torch

    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers that stages could divide")
    return max(lists, key=len)


def _layer_counts(model: "torch.nn.Module", num_stages: int) -> list[int]:
    num_layers = len(_layers(model))
    if num_layers < num_stages:
        raise ConfigError(
            f"the model has {num_layers} layers: --stages is at most {num_layers}, got {num_stages}"
        )
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def _kv_bytes(model: Any) -> int:
    """Returns the bytes of a token's keys and values in one layer."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * heads * size * next(model.parameters()).element_size())


def _free_bytes(model: Any, device: "torch.device", num_stages: int) -> int:
    """Returns a stage's memory beside its share of weights, gradients and Adam's states.

    Each stage has a CUDA device of this one's size; stages on the CPU share the host's memory.
    """
    import psutil
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        free_bytes = psutil.virtual_memory().available
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    states = 2 * weights + sum(each.numel() * _ADAM_BYTES for each in model.parameters())
    memory_bytes = (free_bytes + weights) / (1 if device.type == "cuda" else num_stages)
    if memory_bytes <= states / num_stages:
        raise ConfigError(
            f"training needs {states / num_stages / 1e9:.1f} GB a stage for weights, gradients and optimizer "
            f"states, and {device} has {memory_bytes / 1e9:.1f} GB: use more --stages"
        )
    return int(memory_bytes - states / num_stages)


def _fitted(samples: dict[int, list[float]]) -> PassCost:
    return fit_cost(list(samples), [statistics.median(each) for each in samples.values()])


def _error(cost: PassCost, samples: dict[int, list[float]]) -> float:
    """Returns the median over the lengths of the fit's relative error."""
    medians = {length: statistics.median(each) for length, each in samples.items()}
    return statistics.median(
        abs(cost.seconds(length, length**2) / seconds - 1) for length, seconds in medians.items()
    )
