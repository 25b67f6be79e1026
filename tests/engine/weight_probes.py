"""Which weights does an engine answer with? And giving it others."""

from pathlib import Path

from probes import PROBE_TOKENS, probes
from real_engine import RealEngine
from tiny_models import BLOCK_TOKENS, staged_update

from rose.messages import WeightUpdated

Probed = list[tuple[list[int], list[float]]]


def probe(engine: RealEngine) -> Probed:
    """Greedy tokens and logprobs; the second prompt round must find its own prefixes and nothing else."""
    answers = []
    for turn in probes():
        answer = engine.complete(turn, PROBE_TOKENS)
        assert answer.num_cached_tokens == 0
        assert engine.complete(turn, 1).num_cached_tokens == len(turn) // BLOCK_TOKENS * BLOCK_TOKENS
        answers.append((answer.tokens, answer.logprobs))
    return answers


def version_name(number: int) -> str:
    return f"test/{number}"


def update(engine: RealEngine, folder: Path, number: int) -> None:
    wanted = staged_update(folder, version_name(number))
    response = engine.update_weights(wanted)
    assert response.status_code == 200, response.text
    done = WeightUpdated.model_validate(response.json())
    assert (done.version, done.state_hash) == (wanted.version, wanted.state_hash)
    assert engine.status().weight_version == wanted.version
