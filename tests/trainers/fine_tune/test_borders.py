"""The borders of a model's layers: a pass gives way at each, and computes what it would without them."""

import os
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from rose._shm import Words
from rose.admission.board_snapshot import EngineState, snapshot
from rose.errors import ConfigError
from rose.scheduler.node.pieces import Piece, Work
from rose.trainers.fine_tune.borders import PassBorders
from rose.trainers.fine_tune.guest import TrainingGuest
from rose.trainers.fine_tune.measuring import measure_pieces


class Recorded(TrainingGuest):
    """Notes what it is asked for."""

    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self.pieces: list[tuple[Piece, Work]] = []

    def begin(self, piece: Piece, work: Work) -> None:
        self.pieces.append((piece, work))
        super().begin(piece, work)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 64, (2, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_training_at_borders_is_bit_for_bit_training_without(
    words: Words, model: Any, has_checkpoints: bool
) -> None:
    if has_checkpoints:
        model.gradient_checkpointing_enable()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = []
    for is_guest in (False, True):
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guest, borders = Recorded(words), None
        if is_guest:
            borders = PassBorders(model, guest)
            borders.attach()
            borders.divide_step(optimizer)
        losses = train(model, optimizer)
        if borders is not None:
            guest.leave()
            borders.detach()
        found.append((losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        guest.close()
    (alone, weights), (as_guest, weights_as_guest) = found
    assert alone == as_guest
    assert all(torch.equal(weights[name], weights_as_guest[name]) for name in weights)


def test_each_layer_is_a_piece_forward_backward_and_in_the_update(words: Words, model: Any) -> None:
    guest = Recorded(words)
    borders = PassBorders(model, guest)
    borders.attach()
    optimizer = torch.optim.AdamW(model.parameters())
    borders.divide_step(optimizer)
    train(model, optimizer, steps=1)
    kinds = [piece for piece, _ in guest.pieces]
    # Before the layers, the three of them, the head; back again; the update of layers and the rest.
    assert kinds == [
        *(Piece("forward", layer) for layer in (-1, 0, 1, 2, 3)),
        *(Piece("backward", layer) for layer in (3, 2, 1, 0, -1)),
        Piece("gradients", 0),
        *(Piece("optimizer", part) for part in (0, 1, 2, 3)),
    ]
    assert {work for piece, work in guest.pieces if piece.kind in ("forward", "backward")} == {Work(2, 16)}
    borders.detach()
    guest.leave()
    guest.pieces.clear()
    train(model, optimizer, steps=1)
    assert guest.pieces == []


def test_a_loss_computed_outside_of_the_model_begins_its_backward_pass_with_a_grant(
    words: Words, model: Any
) -> None:
    guest = Recorded(words)
    borders = PassBorders(model, guest)
    borders.attach()
    tokens = torch.randint(0, 64, (2, 16))
    output = model(input_ids=tokens, labels=tokens)
    guest.pieces.clear()
    (output.logits.sum() + output.loss).backward()
    backward = [piece for piece, _ in guest.pieces]
    assert backward == [*(Piece("backward", layer) for layer in (3, 2, 1, 0, -1)), Piece("gradients", 0)]
    guest.pieces.clear()
    model(input_ids=tokens, labels=tokens).logits.sum().backward()
    assert [piece for piece, _ in guest.pieces if piece.kind != "forward"] == backward
    guest.leave()
    borders.detach()


def test_the_thread_stays_on_the_gpus_cpus_until_the_backward_pass_and_leaves_after_an_inference(
    words: Words, model: Any
) -> None:
    everywhere = os.sched_getaffinity(0)
    cpu = {min(everywhere)}
    guest = TrainingGuest(words, cpus=cpu)
    borders = PassBorders(model, guest)
    borders.attach()
    tokens = torch.randint(0, 64, (2, 16))
    try:
        loss = model(input_ids=tokens, labels=tokens).loss
        assert os.sched_getaffinity(0) == cpu
        assert snapshot(words).rollout.state is not EngineState.RUNNING, "the grant is given back"
        loss.backward()
        guest.leave()
        assert os.sched_getaffinity(0) == everywhere
        with torch.no_grad():
            model(input_ids=tokens)
        assert os.sched_getaffinity(0) == everywhere
    finally:
        borders.detach()
        guest.close()


def test_an_unknown_optimizer_steps_in_one_piece(words: Words, model: Any) -> None:
    guest = Recorded(words)
    borders = PassBorders(model, guest)
    optimizer = torch.optim.Adafactor(model.parameters())
    borders.divide_step(optimizer)
    train(model, optimizer, steps=1)
    assert guest.pieces == [(Piece("optimizer", 0), Work(1, 1))]
    guest.leave()
    borders.detach()


def test_measuring_changes_neither_weights_nor_the_random_state(words: Words, model: Any) -> None:
    guest = Recorded(words)
    borders = PassBorders(model, guest)
    borders.attach()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    token_bytes = measure_pieces(model, [8, 16, 32])
    guest.leave()
    assert token_bytes > 3 * 32 * 4  # more than one value a layer and unit
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert guest.times.predict_safe(Piece("backward", 1), Work(1, 24)) < 60.0
    assert Counter(piece for piece, _ in guest.pieces)[Piece("backward", 1)] == 18
    borders.detach()


def test_a_model_without_a_list_of_layers_is_refused(words: Words) -> None:
    guest = TrainingGuest(words)
    with pytest.raises(ConfigError, match="Linear has no list of layers"):
        PassBorders(torch.nn.Linear(2, 2), guest)
    guest.close()
