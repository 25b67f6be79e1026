"""`rose plan`: writes the shard plan of every rank of an engine.

Owns the command and the names of its files. No engine is started and no weight is read. Trainers pass the
plans to their WeightPublisher, and each host's subscriber takes the plans of its ranks (`--plan`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rose.arguments import CommandParser, positive_int, run_command
from rose.errors import ConfigError, FrameError
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.layout import TensorSpec
from rose.transfer.format.shard_plan import ShardPlan


def main(argv: Sequence[str]) -> int:
    """Prints one JSON line per rank: its file and its share of the checkpoint. Raises: ConfigError."""
    arguments = _parser().parse_args(argv)
    specs = _read_specs(arguments.model)
    total = sum(spec.num_elements for spec in specs)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        for plan in _plans(arguments, specs):
            path = arguments.output / f"{plan.rank}.json"
            path.write_text(plan.model_dump_json() + "\n")
            share = {"plan": str(path), "share": round(plan.held_elements() / total, 4), "whole": plan.whole}
            print(json.dumps(share), flush=True)
    except OSError as error:
        raise ConfigError(f"--output {arguments.output}: {error.strerror}") from error
    return 0


def _plans(arguments: argparse.Namespace, specs: list[TensorSpec]) -> Iterator[ShardPlan]:
    """Yields the plan of each rank. Raises: ConfigError where vLLM refuses the model or the sizes."""
    from vllm.engine.arg_utils import EngineArgs

    from rose.engine.weights.shard_recorder import pretended_rank, record_shard_plan

    model, tp_size, pp_size = (
        arguments.model,
        arguments.tensor_parallel_size,
        arguments.pipeline_parallel_size,
    )
    try:
        vllm_config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            speculative_config=arguments.speculative_config,
        ).create_engine_config()
        for pp_rank, tp_rank in product(range(pp_size), range(tp_size)):
            with pretended_rank(
                vllm_config, tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size
            ) as config:
                yield record_shard_plan(config, specs)
    except (OSError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--model {model}, --tensor-parallel-size {tp_size}, --pipeline-parallel-size {pp_size}: "
            f"vLLM refuses: {reason}"
        ) from error


def _read_specs(model: Path) -> list[TensorSpec]:
    try:
        specs = [spec for spec, _ in read_checkpoint(model).values()]
    except (FrameError, OSError) as error:
        raise ConfigError(f"--model {model}: {error}") from error
    if not specs:
        raise ConfigError(f"--model {model}: no *.safetensors files; give a folder with a checkpoint")
    return specs


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object like {{"method": "mtp", ...}}')
    return found


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose plan",
        "Writes which part of a checkpoint each rank of an engine holds, recorded from vLLM's own loaders.",
        "rose plan --model ./models/policy --tensor-parallel-size 4 --output plans",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        parser.add_argument(
            flag, type=positive_int, default=1, help="the engine's flag of this name (default: %(default)s)"
        )
    parser.add_argument(
        "--speculative-config",
        type=_json_object,
        metavar="JSON",
        help="the engine's flag of this name: a head in the model's own checkpoint needs its tensors, too",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the plans, one file ppN-tpN.json for each rank"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command("plan", main, sys.argv[1:]))
