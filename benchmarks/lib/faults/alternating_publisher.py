"""Run as a program: a trainer that publishes two checkpoints in turn, for bench_soak.py.

Versions 0, 2, 4, ... are the first one's weights, and 1, 3, 5, ... the second one's, so a version's number
tells what its tokens must be. It prints one JSON line per version, asks again if the relay is away, and ends
at SIGTERM.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from threading import Event

from safetensors.torch import load_file

from rose.errors import RelayError, WorkerError
from rose.transfer.publish.publisher import WeightPublisher

RETRY_S = 0.5


def main() -> int:
    """Publishes until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--every-s", required=True, type=float)
    parser.add_argument("checkpoints", nargs=2, type=Path)
    args = parser.parse_args()
    is_over = Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    weights = [load_file(checkpoint) for checkpoint in args.checkpoints]
    # The publisher reads the same tensors at each publish, as it would those of a trainer.
    live = {name: tensor.clone() for name, tensor in weights[0].items()}
    publisher = WeightPublisher(live, args.relay, args.run)
    version = 0
    while not is_over.is_set():
        for name, tensor in weights[version % 2].items():
            live[name].copy_(tensor)
        try:
            published = publisher.publish().version
        except RelayError as error:
            print(f"version {version}: {error}", file=sys.stderr)
            is_over.wait(RETRY_S)
            continue
        if published.number != version:
            raise WorkerError(f"version {version} was published as {published}")
        print(json.dumps({"version": version, "t_s": time.monotonic()}), flush=True)
        version += 1
        is_over.wait(args.every_s)
    publisher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
