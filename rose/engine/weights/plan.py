"""`rose plan`: writes the shard plan of every rank of an engine.

Owns: the command and the names of its files. Promises: no engine is started and no weight is read. Trainers
give the plans to their WeightPublisher, and each host's subscriber takes those of its ranks (`--plan`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rose.arguments import CommandParser, run_command
from rose.errors import ConfigError, FrameError
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.layout import TensorSpec


def main(argv: Sequence[str]) -> int:
    """Prints one JSON line per rank: its file and its share of the checkpoint. Raises: ConfigError."""
    arguments = _parser().parse_args(argv)
    specs = _read_specs(arguments.model)
    from vllm.engine.arg_utils import EngineArgs

    from rose.engine.weights.shard_recorder import pretended_rank, record_shard_plan

    vllm_config = EngineArgs(
        model=str(arguments.model), skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    total = sum(spec.num_elements for spec in specs)
    arguments.output.mkdir(parents=True, exist_ok=True)
    tp_size, pp_size = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            with pretended_rank(
                vllm_config, tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size
            ) as config:
                plan = record_shard_plan(config, specs)
            path = arguments.output / f"{plan.rank}.json"
            path.write_text(plan.model_dump_json() + "\n")
            share = {"plan": str(path), "share": round(plan.held_elements() / total, 4), "whole": plan.whole}
            print(json.dumps(share), flush=True)
    return 0


def _read_specs(model: Path) -> list[TensorSpec]:
    try:
        specs = [spec for spec, _ in read_checkpoint(model).values()]
    except (FrameError, OSError) as error:
        raise ConfigError(f"--model {model}: {error}") from error
    if not specs:
        raise ConfigError(f"--model {model}: no *.safetensors files; give a folder with a checkpoint")
    return specs


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose plan",
        "Writes which part of a checkpoint each rank of an engine holds, as vLLM's own loaders say.",
        "rose plan --model ./models/policy --tensor-parallel-size 4 --output plans",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="default %(default)s")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="default %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="folder for ppN-tpN.json")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("plan", main, sys.argv[1:]))
