"""What a job tells the scheduler of the engines of its rollout, where it shares its device."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.errors import WorkerError
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Answer, EngineRun, Report, decode_call, encode
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import Batch, Outgoing
from rose.scheduler.runtime.job.cache import HostCache
from rose.scheduler.runtime.job.job import JobFile, RunningJob


class Engines:
    """A working set of engines, of which each has so many requests; they don't answer if that is None."""

    def __init__(self, num_requests: int | None) -> None:
        self._num_requests = num_requests

    def load(self, cache: HostCache) -> None:
        pass

    def offload(self, cache: HostCache) -> None:
        pass

    def engine_runs(self) -> list[EngineRun]:
        if self._num_requests is None:
            raise WorkerError("http://127.0.0.1:1: no answer")
        return [EngineRun(num_steps=1, seconds=1.0, tokens=1, generated=1, num_requests=self._num_requests)]


class Reporting:
    """A job, and a scheduler that answers all of its calls. ``bodies``: what the job has sent."""

    def __init__(self, folder: Path) -> None:
        self.bodies: list[bytes] = []
        url = f"unix:{folder / 'channel'}"
        self._side = ChannelUrl.parse(url).serve()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()
        self.job = RunningJob(
            JobFile(
                channel=url,
                name="a",
                attempt=1,
                first_iteration=0,
                num_iterations=1,
                group="device",
                rollout_nodes=[0],
                cache_folder=str(folder),
                limit_bytes={},
                shares_device=True,
            )
        )

    def _answer(self) -> None:
        while not self._is_over.is_set():
            arrived, batch = self._side.receive(0.1), Batch()
            for each in arrived:
                self.bodies.append(each.body)
                answer = encode(Answer(seq=decode_call(each.body).seq))
                batch.outgoing.append(Outgoing(client=each.client, body=answer))
            self._side.commit(batch, arrived)

    def report(self) -> list[int]:
        """Returns the engines' requests of a report."""
        self.job.report(Phase.ROLLOUT, 0, 2)
        call = decode_call(self.bodies[-1])
        assert isinstance(call, Report)
        return [run.num_requests for run in call.engines]

    def close(self) -> None:
        self.job._client.close()
        self._is_over.set()
        self._thread.join()
        self._side.close()


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[Reporting]:
    reporting = Reporting(tmp_path)
    yield reporting
    reporting.close()


def test_a_phase_inside_of_a_rollout_leaves_the_rollout_its_engines(reporting: Reporting) -> None:
    with reporting.job.sharing(Engines(1)):
        assert reporting.report() == [1]
        with reporting.job.sharing(None):
            assert reporting.report() == [1]
        assert reporting.report() == [1]
        with reporting.job.sharing(Engines(2)):
            assert reporting.report() == [2]
        assert reporting.report() == [1]
    assert reporting.report() == []


def test_a_scheduler_of_an_earlier_version_takes_a_report_without_engines(reporting: Reporting) -> None:
    assert reporting.report() == []
    assert b"engines" not in reporting.bodies[-1]


def test_engines_that_do_not_answer_are_named_once_in_a_phase(
    reporting: Reporting, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        with reporting.job.sharing(Engines(None)):
            assert reporting.report() == reporting.report() == []
        assert caplog.text.count("http://127.0.0.1:1: no answer") == number
