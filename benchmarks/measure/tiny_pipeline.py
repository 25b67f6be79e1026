"""A tiny RL job on the CPU: a transformer that decodes with a KV cache, and is trained by REINFORCE.

It is a job's program like any other, with `rose.phase` and `progress.step`, for trying the job scheduler and
for measuring what pipelines cost one another. Threads, seeds and microbatches never depend on what runs
beside it, so its rewards and weights are the same bits in each run. With `--elastic` microbatches follow the
job's share of memory, and the weights are the same up to rounding. Never saves a checkpoint.

    python -m rose.measure.tiny_pipeline --rewards rewards.jsonl --iterations 4
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import rose

VOCABULARY = 32
NUM_HEADS = 4
PROMPT_TOKENS = 8
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Block(torch.nn.Module):
    """One layer: attention over the cache and the new tokens, then a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.second = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(
        self, hidden: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """hidden: [rows, new tokens, width]. Returns it and the keys and values of all tokens."""
        rows, tokens, width = hidden.shape
        qkv = self.qkv(self.first(hidden)).view(rows, tokens, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=past is None)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return hidden + self.down(torch.relu(self.up(self.second(hidden)))), (key, value)


class Model(torch.nn.Module):
    """A decoder with learned positions."""

    def __init__(self, width: int, num_layers: int, max_tokens: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(PROMPT_TOKENS + max_tokens, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """ids: [rows, new tokens]. Returns logits of the new tokens, and the cache with them."""
        start = cache[0][0].shape[2] if cache is not None else 0
        hidden = self.tokens(ids) + self.positions.weight[start : start + ids.shape[1]]
        kept: Cache = []
        for number, block in enumerate(self.blocks):
            hidden, pair = block(hidden, cache[number] if cache is not None else None)
            kept.append(pair)
        return self.head(hidden), kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """Sampled responses. `ids`: [samples, prompt and response]; `lengths`: of the responses."""

    ids: torch.Tensor
    lengths: torch.Tensor
    rewards: torch.Tensor


class TinyPipeline:
    """The job: one model, sampled and trained."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        torch.set_default_dtype(torch.float64 if arguments.double else torch.float32)
        self._arguments = arguments
        self.num_microbatches = 0
        self._model = Model(arguments.width, arguments.layers, arguments.max_tokens)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    @torch.no_grad()
    def rollout(self, progress: rose.Progress) -> SampledBatch:
        """Decodes all samples; the batch shrinks as they end. The reward is for repeating the prompt."""
        torch.set_num_threads(self._arguments.decode_threads)
        chance = torch.Generator().manual_seed(self._arguments.seed * 10_007 + progress.iteration)
        num, longest = self._arguments.samples, self._arguments.max_tokens
        ids = torch.zeros(num, PROMPT_TOKENS + longest, dtype=torch.long)
        ids[:, :PROMPT_TOKENS] = torch.randint(1, VOCABULARY, (num, PROMPT_TOKENS), generator=chance)
        # A long tail: a quarter of the samples run to the end.
        lengths = (longest * torch.rand(num, generator=chance).clamp(0.25, 0.75) / 0.75).long().clamp(min=1)
        running = torch.arange(num)
        logits, cache = self._model(ids[:, :PROMPT_TOKENS])
        progress.step(num * PROMPT_TOKENS)
        for position in range(longest):
            keeps = lengths[running] > position
            if not keeps.all():
                running, logits = running[keeps], logits[keeps]
                cache = [(key[keeps], value[keeps]) for key, value in cache]
            if not len(running):
                break
            sampled = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=chance)
            ids[running, PROMPT_TOKENS + position] = sampled[:, 0]
            logits, cache = self._model(sampled, cache)
            progress.step(len(running), len(running))
        return SampledBatch(ids=ids, lengths=lengths, rewards=_rewards(ids, lengths))

    def train(self, progress: rose.Progress, batch: SampledBatch) -> None:
        """Some epochs over the batch, each of which accumulates the gradients of its microbatches."""
        torch.set_num_threads(self._arguments.train_threads)
        advantages = batch.rewards - batch.rewards.mean()
        num_rows = min(len(batch.ids), self._arguments.train_samples)
        num_tokens = batch.lengths[:num_rows].sum()
        for _ in range(self._arguments.epochs):
            self._optimizer.zero_grad()
            for part in self._microbatches(progress, num_rows):
                loss = self._loss(batch.ids[part], batch.lengths[part], advantages[part]) / num_tokens
                loss.backward()  # type: ignore[no-untyped-call]
                self.num_microbatches += 1
                progress.step(batch.ids[part].numel())
            self._optimizer.step()

    def _microbatches(self, progress: rose.Progress, num_rows: int) -> Iterator[slice]:
        rows = self._arguments.microbatch
        if self._arguments.elastic:
            return progress.microbatches(num_rows, rows)
        return (slice(begin, min(num_rows, begin + rows)) for begin in range(0, num_rows, rows))

    def _loss(self, ids: torch.Tensor, lengths: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the responses' tokens."""
        logits, _ = self._model(ids[:, :-1])
        nll = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        at = torch.arange(nll.shape[1])
        is_response = (at >= PROMPT_TOKENS - 1) & (at < PROMPT_TOKENS - 1 + lengths[:, None])
        return (nll * is_response * advantages[:, None]).sum()

    def state(self) -> str:
        """A hash of all weights."""
        found = hashlib.sha256()
        for parameter in self._model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()[:16]


def _rewards(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The share of response tokens that repeat the prompt."""
    response = ids[:, PROMPT_TOKENS:]
    at = torch.arange(response.shape[1])
    wanted = ids[:, :PROMPT_TOKENS][:, at % PROMPT_TOKENS]
    return ((response == wanted) & (at < lengths[:, None])).sum(1) / lengths


def main(argv: Sequence[str]) -> int:
    """Runs the job's iterations, and appends each one's reward and weights' hash to `--rewards`."""
    arguments = _parser().parse_args(list(argv))
    pipeline = TinyPipeline(arguments)

    @rose.phase("rollout")
    def rollout(progress: rose.Progress) -> SampledBatch:
        return pipeline.rollout(progress)

    @rose.phase("train")
    def train(progress: rose.Progress, batch: SampledBatch) -> None:
        pipeline.train(progress, batch)

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        batch = rollout(progress)
        train(progress, batch)
        line = {
            "iteration": progress.iteration,
            "reward": float(batch.rewards.mean()).hex(),
            "tokens": int(batch.lengths.sum()),
            "microbatches": pipeline.num_microbatches,
            "state": pipeline.state(),
        }
        with arguments.rewards.open("a") as log:
            log.write(json.dumps(line) + "\n")

    iteration(arguments.iterations)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rewards", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--iterations", type=int, help="how many, if no scheduler has started it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--microbatch", type=int, default=4, help="its rows with all of the memory")
    parser.add_argument("--elastic", action="store_true", help="microbatches follow the share of memory")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--train-samples", type=int, default=1 << 30, help="train on only the first N")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--decode-threads", type=int, default=1)
    parser.add_argument("--train-threads", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
