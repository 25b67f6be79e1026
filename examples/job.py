"""A job whose phases sleep, in place of a rollout engine and a trainer."""

import time

import rose


@rose.phase("rollout")
def rollout(iteration: int) -> list[str]:
    time.sleep(0.2)
    return [f"sample {number} of iteration {iteration}" for number in range(4)]


@rose.phase("train")
def train(samples: list[str]) -> None:
    time.sleep(0.1)
    print(f"trained on {len(samples)} samples", flush=True)


@rose.phase("sync")
def sync() -> None:
    time.sleep(0.05)


@rose.runtime_hook
def iteration(progress: rose.Progress) -> None:
    train(rollout(progress.iteration))
    sync()


if __name__ == "__main__":
    iteration(num_iterations=3)  # under a scheduler, the job's file says how many
