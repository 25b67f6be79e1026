"""A serving engine that is paused with its requests kept leaves the GPU to rollouts meanwhile."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import pooled_scheduler, request_of
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput

from rose.admission.rollout_side import RolloutSide
from rose.types import Role

pytestmark = pytest.mark.vllm


def test_rollouts_compute_while_serving_is_paused_in_the_middle_of_a_request(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    with pooled_scheduler(tmp_path, Role.SERVING) as serving:
        rollout = RolloutSide(serving.tenant.client.board_words)
        serving.add_request(request_of("kept", [1] * 4, max_tokens=8))
        planned = serving.schedule()
        serving.update_from_output(planned, ModelRunnerOutput(["kept"], {"kept": 0}, [[5]]))
        assert rollout.view().has_work
        serving.set_pause_state(PauseState.PAUSED_ALL)
        assert rollout.view().may_start and not rollout.view().has_work
        serving.set_pause_state(PauseState.UNPAUSED)
        assert rollout.view().has_work and not rollout.view().may_start
        rollout.detach()
