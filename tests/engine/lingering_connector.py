"""A KV connector that sends blocks long after their request has finished, as one over a slow network does."""

from pathlib import Path
from typing import Any

from connector_runs import SEND
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class LingeringConnector(ExampleConnector):
    """``ExampleConnector``, whose files are written from the blocks once ``SEND`` is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsent: list[tuple[Any, ...]] = []
        self._finished: set[str] = set()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._unsent.append((self._get_connector_metadata(), layer_name, kv_layer, attn_metadata))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        self._finished |= finished_req_ids
        if not self._finished or not (Path(self._storage_path) / SEND).exists():
            return None, None
        now = self._get_connector_metadata()
        for metadata, *layer in self._unsent:
            self.bind_connector_metadata(metadata)
            super().save_kv_layer(*layer)
        self.bind_connector_metadata(now)
        self._unsent.clear()
        sent, self._finished = self._finished, set()
        return sent, None


class UnknownConnector(ExampleConnector):
    """A connector that somebody else has written, and that registers the KV cache."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._kv_caches = kv_caches


class LoadingConnector(ExampleConnector):
    """A connector that has two blocks of any longer prompt, and loads them until it is told that they are
    there."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (32, True) if request.num_tokens > 32 and not num_computed_tokens else (0, False)

    def update_state_after_alloc(self, *_: Any) -> None:
        """Loads nothing."""

    def reset_cache(self) -> bool:
        return True
