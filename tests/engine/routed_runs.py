"""Routed experts under ROSE, where there is no GPU: a program like v2_runs.py, whose stand-ins it uses.

python routed_runs.py ARGUMENTS.json ANSWERS.json
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forked_engines import Driver


class RoutedDriver(Driver):
    """Keeps the rows of the answers, too."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.rows: dict[str, Any] = {}
        step = self._engine.step

        def noting() -> Any:
            outputs = step()
            for output in outputs:
                if (rows := output.outputs[0].routed_experts) is not None:
                    self.rows[output.request_id] = rows.tolist()
            return outputs

        self._engine.step = noting

    def run(self, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        names = self.ask([prompt], max_tokens, **more)
        return self.told(names[0], self.wait(names)[0].tokens)

    def told(self, name: str, tokens: list[int]) -> dict[str, Any]:
        return {"tokens": tokens, "rows": self.rows.get(name)}


def main(arguments: Path, answers: Path) -> None:
    given = json.loads(arguments.read_text())
    from engine_runs import _cut, _wait_for_tokens, tenant_of
    from forked_engines import make_engine

    settings = {"role": "rollout", "pool": given["pool"], "stall_s": 600.0}
    driver = RoutedDriver(make_engine(Path(given["model"]), settings, enable_return_routed_experts=True))
    assert driver.core.model_executor.driver_worker.worker.use_v2_model_runner
    prompt, max_tokens = given["prompt"], given["max_tokens"]
    found = {"whole": driver.run(prompt, max_tokens)}
    (name,) = names = driver.ask([[*prompt[1:], 5]], max_tokens)
    found["other"] = driver.told(name, driver.wait(names)[0].tokens)
    (name,) = names = driver.ask([[*prompt[1:], 5]], max_tokens)
    _wait_for_tokens(driver, names)
    _cut(driver, 1)
    (reply,) = driver.wait(names)
    found["cut"] = {**driver.told(name, reply.tokens), "stop_reason": reply.stop_reason}
    _cut(driver, given["num_slabs"])
    so_far = [*prompt[1:], 5, *reply.tokens]
    start = len(so_far) - 1
    found["rest"] = driver.run(so_far, max_tokens - len(reply.tokens), routed_experts_prompt_start=start)
    tenant_of(driver).pool.check_integrity()
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    from triton.backends import backends  # type: ignore[import-untyped]

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
