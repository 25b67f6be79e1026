"""Bad settings end an engine before it loads a model, with one line that says why and exit status 2."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from forked_server import ForkedServer
from made_profiles import store_profile
from real_engine import READY_S, RealEngine, new_folder, runtime_dir
from references import ModelDirs
from tiny_models import SLAB_BYTES
from vllm.engine.arg_utils import EngineArgs

from rose.engine.scheduling.recorder import profile_key
from rose.memory.daemon.daemon import start_daemon
from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_what_an_engine_refuses_ends_it_with_one_clear_line(engines_dir: Path, models: ModelDirs) -> None:
    typo = json.dumps({"rose": {"lease": 3}})
    exporting = json.dumps({"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"})
    serve = [
        *(sys.executable, "-m", "rose.cli", "serve", str(models.serving), "--role", "serving"),
        *("--pool", "strict", "--port", str(free_port()), "--kv-transfer-config", exporting),
    ]
    folder = new_folder(engines_dir, "strict")
    with ExitStack() as undo:

        def engine(*args: str, **rose: str) -> ServerProcess:
            one = RealEngine(models.untied[0], Role.ROLLOUT, folder, *args, **rose)
            undo.callback(one.stop)
            return one.process

        runtime = runtime_dir(folder)
        daemon = start_daemon(
            "strict", num_slabs=8, slab_bytes=SLAB_BYTES, headroom_slabs=2, runtime_dir=runtime
        )
        undo.callback(daemon.stop)
        command = ServerProcess(serve, "serve", folder / "strict.log", env={"ROSE_RUNTIME_DIR": str(runtime)})
        command = ForkedServer(command, "vllm.entrypoints.openai.api_server")
        cases = {
            "--additional-config: unknown key 'rose.lease'; did you mean 'lease_s'?": engine(
                "--additional-config", typo
            ),
            "pool nobody has no daemon": engine(pool="nobody"),
            "--kv-transfer-config FlexKVConnectorV1: it exports the KV cache": undo.enter_context(command),
        }
        for message, process in cases.items():
            assert process.wait(READY_S) == 2, process.log_tail()
            assert process.log_tail(200).count(f"rose: error: {message}") == 1, process.log_tail()
            assert "Traceback" not in process.log_tail(200)
            assert "Loading safetensors" not in process.log_tail(200)


def test_an_slo_below_the_profile_ends_the_engine_with_one_line(engines_dir: Path, models: ModelDirs) -> None:
    folder = new_folder(engines_dir, "slo")
    config = EngineArgs(model=str(models.serving), enforce_eager=True).create_engine_config()
    store_profile(profile_key(config), folder / "cache" / "profiles")
    with ExitStack() as undo:
        daemon = start_daemon(
            "strict", num_slabs=8, slab_bytes=SLAB_BYTES, headroom_slabs=2, runtime_dir=runtime_dir(folder)
        )
        undo.callback(daemon.stop)
        engine = RealEngine(models.serving, Role.SERVING, folder, pool="strict", slo_tpot_ms=5.0)
        undo.callback(engine.stop)
        assert engine.process.wait(READY_S) == 2, engine.process.log_tail()
        log = engine.process.log_tail(200)
    message = "rose: error: --additional-config: 'rose': slo_tpot_ms is 5, but one decoded token takes up to"
    assert log.count(message) == 1, log
    assert "Traceback" not in log and "EngineCore" not in log and "Loading safetensors" not in log
