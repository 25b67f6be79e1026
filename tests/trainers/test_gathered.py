"""Weights of a trainer whose ranks all gather every tensor."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from rose.trainers.gathered import GatheredWeights

Pairs = list[tuple[str, torch.Tensor]]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("names", [["a"], ["a", "c", "b"], ["a", "c"]])
def test_other_tensors_than_those_of_the_first_version_are_refused(
    one_rank: None, relay_url: str, names: list[str]
) -> None:
    """Those that are left out would stay as they were, and new ones would reach no engine."""
    weights = GatheredWeights({"relay_url": relay_url, "run_id": "run"}, "weights", None, "trainer")
    first: Pairs = [(name, torch.randn(4, 4)) for name in ("a", "b")]
    weights.publish(first, has_tied_head=False)
    given = iter([(name, torch.randn(4, 4)) for name in names])
    with pytest.raises(ValueError, match=r"tensor [bc]: the trainer gave it to this rank in one of"):
        weights.publish(given, has_tied_head=False)
    assert next(given, None) is None, "ranks that read on would wait for this one"
    weights.publish(list(reversed(first)), has_tied_head=False)
    assert weights.publisher is not None and str(weights.publisher.version) == "run/1"
    weights.publisher.close()
