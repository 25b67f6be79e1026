"""What ends an attempt on Ray, its host's folders, and the code that is sent. No Ray cluster runs."""

import math
import os
import signal
import subprocess
import time
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from rose.jobs.on_ray import actors, cluster, engine, failures  # noqa: E402 - loads Ray
from rose.jobs.on_ray.cluster import describe_self  # noqa: E402
from rose.jobs.on_ray.failures import checked_env, env_limit_s, failure  # noqa: E402
from rose.jobs.on_ray.leftovers import identity  # noqa: E402
from rose.jobs.ranks import HostPart  # noqa: E402
from rose.scheduler.runtime.channel.messages import Start  # noqa: E402
from rose.scheduler.runtime.job.job import JobNode  # noqa: E402
from rose.scheduler.runtime.job.spec import Launch, RunSpec  # noqa: E402


@pytest.mark.parametrize(
    ("cause", "is_final"),
    [
        (OSError("No space left"), False),
        (RuntimeError("processes [7] do not end"), False),
        (ConfigError("x"), True),
    ],
)
def test_only_a_wrong_job_ends_for_ever_by_an_error_of_its_part(cause: Exception, is_final: bool) -> None:
    error = ray.exceptions.RayTaskError("poll", "traceback", cause).as_instanceof_cause()
    ended = failure(["python"], error)
    assert (ended.cannot_start is not None) is is_final and ended.exit_status != 0


PIP = """Could not create the actor because its associated runtime env failed to be created.
Traceback (most recent call last):
ray._private.runtime_env.utils.SubprocessCalledProcessError: Run cmd[9] failed with the following details.
Command '['pip', 'install', '-r', 'requirements.txt']' returned non-zero exit status 1.
Last 50 lines of stdout:
"""
NO_INDEX = (
    "    WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError("
    "Failed to establish a new connection: [Errno 101] Network is unreachable)': /simple/rosse/\n"
)
NO_PACKAGE = """    ERROR: Could not find a version that satisfies rosse==9 (from versions: none)
    ERROR: No matching distribution found for rosse==9
"""


@pytest.mark.parametrize(
    ("said", "is_final", "reason"),
    [
        (PIP + NO_PACKAGE, True, "ERROR: No matching distribution found for rosse==9"),
        (PIP + NO_INDEX + NO_PACKAGE, False, "Network is unreachable"),
        (PIP + "    ERROR: ResolutionImpossible: for help visit https://pip", True, "ResolutionImpossible"),
        (PIP + "    ERROR: HTTP error 503 Server Error: Service Unavailable", False, "503 Server Error"),
        ("Timeout: the runtime env was not set up within 600 s", False, "within 600 s"),
        ("PackagesNotFoundError: these packages are not available: x", True, "PackagesNotFoundError"),
        ("the agent has ended", False, "the agent has ended"),
    ],
)
def test_packages_that_do_not_exist_end_a_job_and_passing_faults_do_not(
    said: str, is_final: bool, reason: str
) -> None:
    ended = failure(["python"], ray.exceptions.RuntimeEnvSetupError(said))
    told = ended.cannot_start if is_final else ended.why
    assert told is not None and reason in told and "runtime_env can't be prepared" in told
    assert (ended.cannot_start is None) is not is_final and ended.exit_status != 0


def test_time_in_which_nobody_asks_the_head_is_no_silence() -> None:
    silence = cluster.Silence()
    assert silence.seconds(cluster.LIMIT_S * 9) == 0, "as when joining takes long, or this host stops"
    silence.ask(10.0)
    silence.ask(15.0)
    assert [silence.seconds(float(now)) for now in range(11, 31)][-1] == 20.0
    silence.answered()
    assert silence.seconds(99.0) == 0


def test_a_head_is_not_silent_while_its_scheduler_stands_still() -> None:
    silence = cluster.Silence()
    silence.ask(10.0)
    assert silence.seconds(12.0) == 2.0
    assert silence.seconds(12.0 + 9 * cluster.LIMIT_S) == 2.0 + cluster.STILL_S


@pytest.mark.parametrize(("num_looks", "is_ours"), [(3, True), (10**6, False)])
def test_a_cluster_is_taken_over_once_ray_has_noticed_that_a_scheduler_of_another_host_has_ended(
    monkeypatch: pytest.MonkeyPatch, num_looks: int, is_ours: bool
) -> None:
    class Ray:
        """Says for some looks that the name is taken."""

        num_left, now_s = num_looks, 0.0

        def options(self, **_: Any) -> "Ray":
            return self

        def remote(self, who: str) -> str:
            self.num_left -= 1
            if self.num_left >= 0:
                raise ValueError("taken")
            return who

        def monotonic(self) -> float:
            return self.now_s

        def sleep(self, seconds: float) -> None:
            self.now_s += seconds

    fake = Ray()
    monkeypatch.setattr(ray, "remote", lambda _: fake)
    monkeypatch.setattr(cluster, "time", fake)
    monkeypatch.setattr(cluster, "on_node", lambda _: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Here", (), {"get_node_id": str}))
    monkeypatch.setattr(cluster, "_other", lambda: "host elsewhere, pid 1, channel redis://r:1/0")
    said: list[str] = []
    if is_ours:
        assert cluster._own("me", said.append) == "me"
    else:
        with pytest.raises(ConfigError, match="has a scheduler already"):
            cluster._own("me", said.append)
    assert "host elsewhere" in said[0]


def test_an_environment_without_a_limit_is_waited_for_as_long_as_it_takes() -> None:
    assert env_limit_s({"config": {"setup_timeout_seconds": -1}}) == math.inf
    assert env_limit_s({"config": {"setup_timeout_seconds": 30}}) == failures.WORKER_LIMIT_S + 30
    assert env_limit_s({}) == failures.WORKER_LIMIT_S + failures.ENV_LIMIT_S


def test_an_environment_that_ray_does_not_understand_fails_the_job_for_good() -> None:
    assert checked_env({"env_vars": {"A": "1"}}) == {"env_vars": {"A": "1"}}
    with pytest.raises(ConfigError, match=r"runtime_env: .*; mend the job's runtime_env"):
        checked_env({"env_vars": {"A": 1}})


def test_output_that_nobody_has_kept_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    part = actors.Part("a", "rollout-0", "test-output")
    part._log.parent.mkdir(parents=True)
    part._log.write_bytes(b"one\ntwo\nthr")
    first = part.poll(None)
    assert (first.output, first.end) == (b"one\ntwo\n", 8)
    assert part.poll(None) == first, "as when a scheduler was killed before it wrote the lines"
    part._log.write_bytes(b"one\ntwo\nthree\n")
    assert part.poll(first.end).output == b"three\n"
    assert part.poll(None).output == b"three\n"


def test_a_host_frees_what_jobs_have_left_whose_parts_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    try:
        jobs = {"live": identity(os.getpid()), "dead": f"{os.getpid()}:1", "full-disk": ""}
        for job, mark in jobs.items():
            for folder in actors.folders("test-stale", job):
                folder.mkdir(parents=True)
            (actors.folders("test-stale", job)[0] / "train-0").mkdir()
            (actors.folders("test-stale", job)[0] / "train-0" / actors.MARK).write_text(mark)
        actors.remove_stale(actors.folders("test-stale")[0].parent)
        for job, is_kept in (("live", True), ("dead", False), ("full-disk", False)):
            assert [each.exists() for each in actors.folders("test-stale", job)] == [is_kept, is_kept]
    finally:
        actors.sweep((), "test-stale")


def test_a_host_goes_on_freeing_while_a_part_frees_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    job, _ = actors.folders("test-gone", "job")
    (job / "train-0").mkdir(parents=True)
    (job / "train-0" / actors.MARK).write_text("1:1")
    with monkeypatch.context() as patched:  # listed, and not there when it is read
        patched.setattr(Path, "read_text", _gone)
        actors.remove_stale(job.parent.parent)
        assert job.exists()
        assert actors.sweep((), "test-gone", "job") == []
    assert not job.exists()


def test_a_sweep_ends_a_part_that_has_not_told_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    with subprocess.Popen(["sleep", "600"]) as actor:
        try:
            os.kill(actor.pid, signal.SIGSTOP)
            folder = actors.folders("test-hung", "job")[0] / "train-0"
            folder.mkdir(parents=True)
            (folder / actors.MARK).write_text(identity(actor.pid))
            assert actors.sweep((), "test-hung", "job") == []
            assert identity(actor.pid) == ""
        finally:
            actor.kill()


def test_a_part_that_was_killed_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(actors, "forget_variables", lambda prefix: None)
    spec = {"name": "a", "command": ["sleep", "600"], "folder": str(tmp_path), "slo": 2.0, "iterations": 1}
    spec |= {"phases": {"rollout": {"seconds": 1.0}, "train": {"seconds": 1.0}}, "max_tokens": 64}
    order = Start(
        job="a", attempt=1, spec=spec, first_iteration=0, group="g", rollout_nodes=[0], num_train_nodes=1
    )
    here = HostPart(nodes=(JobNode(name="rollout-0", address="127.0.0.1"),), master_port=1)
    part = actors.Part("a", "rollout-0", "test-killed")
    part.kill()
    try:
        part.start(order, here, ("r",), "unix:/c")
        assert part.begun() is None
    finally:
        part.kill()


def test_the_processes_of_a_part_have_the_variables_that_the_scheduler_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(actors, "forget_variables", lambda prefix: None)
    spec: dict[str, Any] = {
        "name": "a",
        "command": ["sh", "-c", "echo $OPENAI_API_KEY"],
        "folder": str(tmp_path),
    }
    spec |= {"phases": {"rollout": {"seconds": 1.0}, "train": {"seconds": 1.0}}, "max_tokens": 64}
    spec |= {"slo": 2.0, "iterations": 1}
    order = Start(
        job="a",
        attempt=1,
        spec=spec,
        first_iteration=0,
        group="g",
        rollout_nodes=[0],
        variables={"OPENAI_API_KEY": "of-this-job"},
    )
    here = HostPart(nodes=(JobNode(name="rollout-0", address="127.0.0.1"),), master_port=1)
    part = actors.Part("a", "rollout-0", "test-variables")
    try:
        part.prepare(None)
        part.start(order, here, ("r",), "unix:/c")
        while part.poll(0).ended is None:
            time.sleep(0.02)
        assert part.poll(0).output == b"of-this-job\n"
    finally:
        part.kill()


def test_a_sweep_frees_the_files_and_the_host_memory_of_one_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(actors, "end_leftovers", lambda marks: [int(mark) for mark in marks])
    kept, freed = ([each / "f" for each in actors.folders("test-sweep", name)] for name in "ab")
    try:
        for path in (*kept, *freed):
            path.mkdir(parents=True)
        assert actors.sweep(("7",), "test-sweep", "b") == [7] and all(path.exists() for path in freed)
        assert actors.sweep((), "test-sweep", "b") == []
        assert not any(path.exists() for path in freed) and all(path.exists() for path in kept)
    finally:
        actors.sweep((), "test-sweep")
    assert not any(path.exists() for path in kept)


def test_a_scheduler_does_not_tell_others_its_password() -> None:
    assert describe_self("redis://me:p@ss@head:6380/0").endswith("channel redis://head:6380/0")


class Spec:
    """The part of a job's file that is packed."""

    def __init__(self, folder: Path) -> None:
        self.runtime_env: dict[str, Any] = {"working_dir": str(folder)}


def test_code_is_packed_also_from_below_a_hidden_folder_and_with_old_times(tmp_path: Path) -> None:
    folder = tmp_path / ".git" / "code"
    (folder / "__pycache__").mkdir(parents=True)
    for name in ("train.py", "__pycache__/train.pyc"):
        (folder / name).write_text("pass")
    os.utime(folder / "train.py", (0, 0))
    code = engine.packed(Spec(folder))  # type: ignore[arg-type]
    assert code is not None and zipfile.ZipFile(BytesIO(code)).namelist() == ["train.py"]


def test_code_that_is_too_large_or_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(os.urandom(4096))
    spec: Any = Spec(tmp_path)
    monkeypatch.setattr(zipfile.ZipFile, "write", _unreadable)
    with pytest.raises(ConfigError, match="can't be read"):
        engine.packed(spec)
    monkeypatch.undo()
    monkeypatch.setattr(engine, "MAX_CODE_BYTES", 1000)
    with pytest.raises(ConfigError, match="keep data elsewhere"):
        engine.packed(spec)


def _gone(path: Path) -> str:
    raise FileNotFoundError(2, "No such file or directory", str(path))


def _unreadable(*_: object) -> None:
    raise PermissionError(13, "Permission denied", "data")


@pytest.mark.parametrize(("launch", "kept"), [("once", ["a", "b", "c"]), ("per-node", ["b", "c"])])
def test_the_memory_of_a_host_is_for_the_nodes_whose_state_it_keeps(launch: str, kept: list[str]) -> None:
    nodes = tuple(
        JobNode(name=name, address=f"10.0.0.{host}") for name, host in (("a", 1), ("b", 2), ("c", 2))
    )
    phases = {"rollout": {"seconds": 1.0, "nodes": 3}, "train": {"seconds": 1.0}}
    spec = RunSpec.model_validate(
        {"name": "j", "command": ["x"], "iterations": 1, "max_tokens": 9, "phases": phases}
    )
    spec = spec.model_copy(update={"launch": Launch(launch)})
    part = HostPart(nodes=nodes, index=1, master_port=1)
    assert [node.name for node in actors._kept_here(spec, part)] == kept
