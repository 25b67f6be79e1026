"""What a copy engine of a GPU does for vLLM's OffloadingConnector, on the host and late.

vLLM's own OffloadingSpec for host memory wants a GPU. This one keeps its bookkeeping and copies between
tensors of the host: a copy happens ``LATE_POLLS`` looks after it was asked for, or when it is waited for.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LATE_POLLS = 60
"""More than the steps of an answer, so that copies are pending when their request ends."""


class LateOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        (packed,) = kv_caches.tensors
        return LateWorker(packed.tensor, self.num_chunks)


class LateWorker(OffloadingWorker):
    def __init__(self, blocks: torch.Tensor, num_chunks: int) -> None:
        self._blocks = blocks
        self._chunks = torch.zeros((num_chunks, blocks.shape[1]), dtype=torch.int8)
        self._jobs: dict[int, tuple[int, Any]] = {}
        self._num_polls = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, (self._chunks, dst_spec.block_ids, self._blocks, src_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, (self._blocks, dst_spec.block_ids, self._chunks, src_spec.block_ids))

    def _submit(self, job_id: int, copy: Any) -> bool:
        self._jobs[job_id] = (self._num_polls + LATE_POLLS, copy)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._num_polls += 1
        due = [job_id for job_id, (poll, _) in self._jobs.items() if poll <= self._num_polls]
        return [self._do(job_id) for job_id in due]

    def wait(self, job_ids: set[int]) -> None:
        """Copies at once, and has the jobs found finished at the next look."""
        for job_id in job_ids & self._jobs.keys():
            self._copy(job_id)
            self._jobs[job_id] = (0, None)

    def _do(self, job_id: int) -> TransferResult:
        self._copy(job_id)
        del self._jobs[job_id]
        return TransferResult(job_id=job_id, success=True)

    def _copy(self, job_id: int) -> None:
        if (copy := self._jobs[job_id][1]) is not None:
            to, to_ids, source, source_ids = copy
            for one, other in zip(to_ids.tolist(), source_ids.tolist(), strict=True):
                to[one] = source[other]
