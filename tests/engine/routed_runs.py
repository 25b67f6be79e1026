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

    def run(self, prompts: list[list[int]], max_tokens: int, **more: Any) -> list[dict[str, Any]]:
        names = self.ask(prompts, max_tokens, **more)
        return self.told(names)

    def told(self, names: list[str]) -> list[dict[str, Any]]:
        replies = zip(names, self.wait(names), strict=True)
        return [
            {"tokens": reply.tokens, "rows": self.rows.get(name), "stop_reason": reply.stop_reason}
            for name, reply in replies
        ]


def main(arguments: Path, answers: Path) -> None:
    given = json.loads(arguments.read_text())
    from engine_runs import _cut, _wait_for_tokens, tenant_of
    from forked_engines import make_engine

    settings = {"role": "rollout", "pool": given["pool"], "stall_s": 600.0}
    driver = RoutedDriver(make_engine(Path(given["model"]), settings, enable_return_routed_experts=True))
    assert driver.core.model_executor.driver_worker.worker.use_v2_model_runner
    prompts, max_tokens = given["prompts"], given["max_tokens"]
    whole = driver.run(prompts, max_tokens)
    names = driver.ask(prompts, max_tokens)
    _wait_for_tokens(driver, names)
    _cut(driver, tenant_of(driver).pool.num_positions_in_use() // 2)
    cut = driver.told(names)
    _cut(driver, given["num_slabs"])
    rest = []
    for prompt, reply in zip(prompts, cut, strict=True):
        so_far, left = [*prompt, *reply["tokens"]], max_tokens - len(reply["tokens"])
        more = {"routed_experts_prompt_start": len(so_far) - 1}
        rest += driver.run([so_far], left, **more) if left else [{"tokens": [], "rows": []}]
    tenant_of(driver).pool.check_integrity()
    answers.write_text(json.dumps({"whole": whole, "cut": cut, "rest": rest}))


if __name__ == "__main__":
    from triton.backends import backends  # type: ignore[import-untyped]

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
