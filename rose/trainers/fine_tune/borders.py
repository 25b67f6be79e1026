"""Where training may give way: at the borders of a model's layers, forward, backward and in the update.

Owns the hooks on a model and its optimizer. Promises that the results are bit for bit those without hooks.
Works for any Hugging Face model whose decoder is a list of layers, and with gradient checkpointing, where the
recomputed forward pass counts as part of the backward piece. Source: LeMix §IV-B, backward planning; here by
layers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rose.errors import ConfigError
from rose.scheduler.node.pieces import Piece, Work
from rose.trainers.fine_tune.guest import TrainingGuest

_ONCE = Work(1, 1)
"""An update's work does not depend on the microbatch."""
_SEPARABLE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Optimizers whose step on some of the parameters does not touch the others."""


class PassBorders:
    """A model's hooks, from ``attach`` to ``detach``."""

    def __init__(self, model: Any, guest: TrainingGuest) -> None:
        """Raises: ConfigError if the model has no list of layers."""
        self._model = model
        self._guest = guest
        self._layers = decoder_layers(model)
        self._hooks: list[Any] = []
        self._work = _ONCE
        self._is_backward = False
        self._backward_at: int | None = None
        """The layer that the backward pass has reached."""
        self._stepping: tuple[torch.optim.Optimizer, Callable[..., Any]] | None = None

    def attach(self) -> None:
        """Makes every pass of the model ask for grants from now on."""
        model, hooks = self._model, self._hooks
        hooks.append(model.register_forward_pre_hook(self._pass_begins, with_kwargs=True))
        parts: list[Any] = list(self._layers)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        parts += [head] if head is not None else []
        for number, part in enumerate(parts):
            hook = partial(self._layer_begins, number)
            hooks.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.append(model.register_forward_hook(self._pass_ends))

    def divide_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer update layer by layer, under grants. Optimizers other than Adam and SGD update
        in one piece."""
        step = optimizer.step
        parts = self._parameter_parts() if type(optimizer) in _SEPARABLE else []

        def divided(closure: Callable[[], float] | None = None) -> Any:
            if closure is not None or len(parts) < 2:
                self._guest.begin(Piece("optimizer", 0), _ONCE)
                return step() if closure is None else step(closure)
            return self._step_in_parts(optimizer, step, parts)

        # torch's learning-rate schedulers look for their mark on the method that they call.
        divided._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = divided  # type: ignore[method-assign]
        self._stepping = (optimizer, step)

    def detach(self) -> None:
        """Takes all hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._stepping is not None:
            optimizer, step = self._stepping
            optimizer.step = step  # type: ignore[method-assign]
            self._stepping = None

    # Forward ----------------------------------------------------------------------------------------------

    def _pass_begins(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        given = next((each for each in inputs if isinstance(each, torch.Tensor)), None)
        self._work = Work(*given.shape[:2]) if given is not None and given.dim() >= 2 else _ONCE
        self._guest.begin(Piece(self._forward_kind(), -1), self._work)

    def _forward_kind(self) -> str:
        return "forward" if torch.is_grad_enabled() else "inference"

    def _layer_begins(
        self, number: int, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_backward:
            return
        self._guest.begin(Piece(self._forward_kind(), number), self._work)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            self._note_backward(hidden, number - 1)

    def _pass_ends(self, module: object, args: tuple[Any, ...], output: Any) -> None:
        # On a GPU, too, a loss that is computed outside of the model runs without a grant.
        self._guest.leave(keeps_cpus=torch.is_grad_enabled())
        # A trainer may compute its loss from any of them.
        for made in output.values() if isinstance(output, Mapping) else (output,):
            if isinstance(made, torch.Tensor) and made.requires_grad:
                self._note_backward(made, len(self._layers))

    def _note_backward(self, tensor: torch.Tensor, layer: int) -> None:
        hook = partial(self._backward_reaches, layer, self._work)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    # Backward: these run in autograd's thread -------------------------------------------------------------

    def _backward_reaches(self, layer: int, work: Work, _gradient: torch.Tensor) -> None:
        if not self._is_backward:
            self._is_backward = True
            self._backward_at = None
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if layer != self._backward_at:  # several outputs of a pass are reached one after the other
            self._backward_at = layer
            self._guest.begin(Piece("backward", layer), work)

    def _backward_ends(self) -> None:
        self._is_backward = False
        # This piece lasts until the trainer says what comes next: gradients may be clipped now.
        self._guest.begin(Piece("gradients", 0), _ONCE)

    # Update -----------------------------------------------------------------------------------------------

    def _parameter_parts(self) -> list[set[int]]:
        """Returns the parameters by layer, as object ids; the last set has those outside of layers."""
        parts = [{id(each) for each in layer.parameters()} for layer in self._layers]
        in_layers = set().union(*parts)
        return [*parts, {id(each) for each in self._model.parameters()} - in_layers]

    def _step_in_parts(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], parts: Sequence[set[int]]
    ) -> None:
        groups = optimizer.param_groups
        try:
            for number, part in enumerate(parts):
                self._guest.begin(Piece("optimizer", number), _ONCE)
                mine = [[each for each in group["params"] if id(each) in part] for group in groups]
                optimizer.param_groups = [
                    {**group, "params": params} for group, params in zip(groups, mine, strict=True) if params
                ]
                step()
        finally:
            optimizer.param_groups = groups


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Returns the longest list of modules. Raises: ConfigError if there is none."""
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers at whose borders it could give way")
    return max(lists, key=len)
