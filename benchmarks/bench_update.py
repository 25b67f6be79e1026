"""A small update costs a host in proportion to what changed, and pauses an engine for about one step.

The first part measures what a host does. A dense model of random bits changes 1% of its elements in each
version. It reaches a relay, a follower with a host's mirror, and the models of two engines, which are in
vLLM's own layers and make no steps. The times of the host are CPU seconds. The parts of a round take turns.
  update_host_s_per_gb[1%]  the follower (decode, apply, changes file) and all engines (find, compare, write)
  host_copies               files of the mirror and of changes at their largest, over the model's bytes
  write_over_memcpy         what an engine does in its pause, over a copy of its model
  publish_blocks_s_per_gb   wall time of publish_async(), after which the next step may begin, in model copies

The second part measures what a stream of an engine shows. A trainer, a relay, a subscriber and a real engine
that always streams tokens are a process each. Each version changes 1% of the elements.
  pause_over_step           the engine's pause over one step, less writing the changes and packing weights
  gap_over_step             the longest time between two tokens; the prefix is computed again within it
  publish_to_token_s        from publish() to the first token under the new weights, with its parts

    python benchmarks/bench_update.py --quick --json update.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lib.engines.lone import LoneModel
from lib.harness import median_figure, run_benchmark
from lib.transfer.live_update import LiveUpdate, change, live_updates

from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.messages import WeightUpdate
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import Note, WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format.codec import Elements
from rose.transfer.format.layout import Bucket
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.shared_planes import PlanesFile
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay
from rose.types import WeightVersion

ENGINES = 2
CHANGED = 0.01
HIDDEN, LAYERS, QUICK_LAYERS = 1024, 24, 6
VOCABULARY = 8192
ROUNDS, QUICK_ROUNDS = 10, 4
RELAY_BYTES = 4 << 30
LIVE = LoneModel(hidden=1024, layers=32, slab_bytes=0)
"""Half a billion weights, in an engine without a pool (``slab_bytes`` 0)."""
QUICK_LIVE = LoneModel(hidden=1024, layers=6, slab_bytes=0)


@dataclass
class Round:
    """The CPU seconds of the parts of one update, and some wall times."""

    blocked_s: float = 0.0
    """Wall time until the trainer's next step may begin."""
    sent_s: float = 0.0
    """Wall time until the relay has the version."""
    copy_s: float = 0.0
    """Wall time of a copy of the model."""
    follow_s: float = 0.0
    apply_s: float = 0.0
    file_s: float = 0.0
    prepare_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    memcpy_s: float = 0.0
    held_bytes: int = 0

    @property
    def host_s(self) -> float:
        return self.follow_s + sum(self.prepare_s) + sum(self.write_s)


class TimedMirror(SharedMirror):
    """A mirror that measures the CPU seconds of applying the last update and of writing its changes file."""

    apply_s = 0.0
    file_s = 0.0

    @contextmanager
    def changing(self, planes: WeightPlanes, counts: Sequence[tuple[Bucket, int]]) -> Iterator[Note | None]:
        began_s, self.file_s = time.process_time(), 0.0
        with super().changing(planes, counts) as note:
            assert note is not None

            def noted(bucket: Bucket, elements: Elements) -> None:
                self.file_s += timed(partial(note, bucket, elements))

            yield noted
        self.apply_s = time.process_time() - began_s - self.file_s

    def arrived(self, planes: WeightPlanes, version: WeightVersion, state_hash: StateHash) -> None:
        self.file_s += timed(partial(super().arrived, planes, version, state_hash))


def timed(act: Callable[[], object]) -> float:
    """Returns the CPU seconds that all threads of this process use for ``act``."""
    started_s = time.process_time()
    act()
    return time.process_time() - started_s


class ChangedEngine:
    """One engine's parameters and its writer of changes."""

    def __init__(self, vllm_config: Any, planes: PlanesFile) -> None:
        import torch
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        from rose.engine.weights.in_place import InPlaceWriter
        from rose.engine.weights.reload import LiveModel
        from rose.engine.weights.shard_recorder import detached_config

        with set_default_torch_dtype(vllm_config.model_config.dtype):
            model: Any = initialize_model(vllm_config=detached_config(vllm_config))
        tensors = (
            (spec.name, torch.from_numpy(planes.tensor(spec).copy()).view(torch.bfloat16))
            for spec in planes.layout.tensors
        )
        with torch.no_grad():
            model.load_weights(tensors)
        self._writer = InPlaceWriter([LiveModel(model, vllm_config.model_config)], vllm_config)
        self._planes = planes
        with planes.reading() as (_, self._state_hash):
            pass

    def prepare(self, update: WeightUpdate) -> None:
        """Raises: WorkerError unless the changes can be written."""
        self._writer.begin(self._planes, update.changes, self._state_hash, update.state_hash)
        while not self._writer.result()[0]:
            time.sleep(0.001)
        if problem := self._writer.result()[1]:
            raise WorkerError(problem)
        self._state_hash = update.state_hash

    def write(self) -> None:
        changes = self._writer.take()
        assert changes is not None
        changes.write()
        changes.finish(self._planes)

    def close(self) -> None:
        self._writer.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("host", "live"), help="what a host does, or what a stream shows")


def measure(args: argparse.Namespace) -> list[Figure]:
    found: list[Figure] = []
    if args.only != "live":
        found += measure_host(args)
    if args.only != "host":
        updates, num_bytes = live_updates(
            QUICK_LIVE if args.quick else LIVE, QUICK_ROUNDS if args.quick else ROUNDS, args.seed
        )
        found += live_figures(updates, num_bytes)
    return found


def measure_host(args: argparse.Namespace) -> list[Figure]:
    layers, rounds = (QUICK_LAYERS, QUICK_ROUNDS) if args.quick else (LAYERS, ROUNDS)
    with TemporaryDirectory(prefix="rose-bench-", dir="/dev/shm") as folder, ranked_config(layers) as config:
        weights, num_bytes = random_weights(config, args.seed)
        with Rig() as rig:
            _, url = rig.start_relay("relay", kind="embedded", capacity_bytes=RELAY_BYTES)
            return figures(run_rounds(url, weights, config, Path(folder), rounds), num_bytes)


def run_rounds(url: str, weights: dict[str, Any], config: Any, folder: Path, count: int) -> list[Round]:
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    with ExitStack() as open_now:
        publisher = open_now.enter_context(closing(WeightPublisher(weights, url, "bench")))
        relay = open_now.enter_context(closing(open_relay(url)))
        store = open_now.enter_context(closing(TimedMirror(folder / "mirror")))
        follower = Follower(relay, "bench", WeightMirror(store=store))
        publisher.publish()
        follower.advance()
        first = store.update_from(None)
        assert first is not None
        planes = open_now.enter_context(closing(PlanesFile(Path(first.path))))
        engines = [open_now.enter_context(closing(ChangedEngine(config, planes))) for _ in range(ENGINES)]
        version, found = first.version, []
        for number in range(count + 1):
            change(weights, CHANGED, number)
            one = Round()
            started_s = time.perf_counter()
            sent = publisher.publish_async()
            one.blocked_s = time.perf_counter() - started_s
            sent.result()
            one.sent_s = time.perf_counter() - started_s
            one.follow_s = timed(follower.advance)
            one.apply_s, one.file_s = store.apply_s, store.file_s
            update = store.update_from(version)
            assert update is not None
            for engine in engines:
                one.prepare_s.append(timed(partial(engine.prepare, update)))
                one.write_s.append(timed(engine.write))
            one.held_bytes = sum(path.stat().st_blocks * 512 for path in (folder / "mirror").iterdir())
            started_s = time.perf_counter()
            one.memcpy_s = timed(lambda: [copies[name].copy_(each) for name, each in weights.items()])
            one.copy_s = time.perf_counter() - started_s
            store.forget({update.version})
            version = update.version
            found.append(one)
        return found[1:]  # the first one records the plans


def figures(rounds: list[Round], model_bytes: int) -> list[Figure]:
    gb = model_bytes / 1e9

    def per_gb(part: Callable[[Round], float]) -> list[float]:
        return [part(one) / gb for one in rounds]

    parts: dict[str, float | None] = {
        "follower": statistics.median(per_gb(lambda one: one.follow_s)),
        "follower, apply": statistics.median(per_gb(lambda one: one.apply_s)),
        "follower, changes file": statistics.median(per_gb(lambda one: one.file_s)),
        "an engine, beside its steps": statistics.median(per_gb(lambda one: statistics.mean(one.prepare_s))),
        "an engine, in its pause": statistics.median(per_gb(lambda one: statistics.mean(one.write_s))),
        "a copy of the model": statistics.median(per_gb(lambda one: one.memcpy_s)),
        "GB": gb,
    }
    host = per_gb(lambda one: one.host_s)
    copies = [one.held_bytes / model_bytes for one in rounds]
    writes = [statistics.mean(one.write_s) / one.memcpy_s for one in rounds]
    blocked = [one.blocked_s / one.copy_s for one in rounds]
    sent: dict[str, float | None] = {
        "until sent": statistics.median(one.sent_s / one.copy_s for one in rounds)
    }
    return [
        median_figure("update_host_s_per_gb[1%]", host, "s/GB", target="<= 0.10", peers=parts),
        median_figure("host_copies", copies, "ratio", target="<= 1.2"),
        median_figure("write_over_memcpy", writes, "ratio"),
        median_figure("publish_blocks_s_per_gb", blocked, "memcpys", target="<= 1.5", peers=sent),
    ]


def live_figures(updates: list[LiveUpdate], model_bytes: int) -> list[Figure]:
    def middle(part: Callable[[LiveUpdate], float]) -> float:
        return statistics.median(part(one) for one in updates)

    pauses = [(one.pause_s - one.write_s - one.load_s) / one.step_s for one in updates]
    beside: dict[str, float | None] = {
        "writing the changes": middle(lambda one: one.write_s / one.step_s),
        "packing weights": middle(lambda one: one.load_s / one.step_s),
        "a step, s": middle(lambda one: one.step_s),
        "GB": model_bytes / 1e9,
    }
    parts: dict[str, float | None] = {
        "encode": middle(lambda one: one.encode_s),
        "relay": middle(lambda one: one.relay_s),
        "follower": middle(lambda one: one.follow_s),
        "engine, beside its steps": middle(lambda one: one.stage_s),
        "engine's pause": middle(lambda one: one.pause_s),
        "of it, writing": middle(lambda one: one.write_s),
        "of it, packing": middle(lambda one: one.load_s),
        "first token": middle(lambda one: one.token_s),
    }
    return [
        median_figure("pause_over_step", pauses, "ratio", target="<= 1.5", peers=beside),
        median_figure("gap_over_step", [one.gap_s / one.step_s for one in updates], "ratio"),
        median_figure("publish_to_token_s", [one.total_s for one in updates], "s", peers=parts),
    ]


def random_weights(vllm_config: Any, seed: int) -> tuple[dict[str, Any], int]:
    """Returns tensors of the checkpoint's names and shapes, and their bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(vllm_config.model_config.hf_config, dtype=torch.bfloat16)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    return weights, sum(each.nbytes for each in weights.values())


@contextmanager
def ranked_config(layers: int) -> Iterator[Any]:
    """Yields the configuration of an engine with one rank."""
    from lib.transfer.pretended_rank import pretended_rank
    from transformers import Qwen3Config
    from vllm.engine.arg_utils import EngineArgs

    hf_config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 128,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    with TemporaryDirectory() as folder:
        hf_config.save_pretrained(folder)
        arguments = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True)
        with pretended_rank(arguments.create_engine_config()) as config:
            yield config


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, add_arguments))
