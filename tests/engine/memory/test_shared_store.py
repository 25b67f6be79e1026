"""Engines share Mooncake's store only if its objects are the same bytes to all of them."""

from typing import Any

import pytest

from rose.engine.memory.connector_holds import check_shared_store
from rose.errors import PoolError
from rose.memory.slabs.layout import SlabLayout

vllm_config = pytest.importorskip("vllm.config", reason="vllm is not installed")

BLOCK_BYTES = 384 << 10
PADDED = SlabLayout.plan(block_bytes=BLOCK_BYTES, slab_bytes=512 << 10)
DENSE = SlabLayout.plan(block_bytes=BLOCK_BYTES, slab_bytes=768 << 10)
SKEWED = SlabLayout.plan(block_bytes=BLOCK_BYTES, slab_bytes=1056 << 10, alignment=96 << 10)
STORE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
NAMED = {"kv_connector_extra_config": {"cache_prefix": "slabs-524288"}}


def config(**given: Any) -> Any:
    return vllm_config.KVTransferConfig(**given)


def inside_another(**given: Any) -> dict[str, Any]:
    children = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {**STORE, **given}]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.mark.parametrize("given", [STORE, inside_another()])
def test_padded_blocks_in_a_shared_store_are_refused_with_the_fix(given: dict[str, Any]) -> None:
    with pytest.raises(PoolError, match=r"has 131072 bytes of padding.*set cache_prefix.*slabs-524288"):
        check_shared_store(config(**given), PADDED)


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        (STORE, DENSE),
        (STORE, SKEWED),
        ({**STORE, **NAMED}, PADDED),
        (inside_another(**NAMED), PADDED),
        ({**STORE, "kv_connector": "OffloadingConnector"}, PADDED),
    ],
)
def test_blocks_without_padding_and_stores_under_a_name_of_their_own_are_not(
    given: dict[str, Any], layout: SlabLayout
) -> None:
    check_shared_store(config(**given), layout)
