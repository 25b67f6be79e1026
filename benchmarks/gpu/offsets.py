"""Torch's operations over a range in which offsets pass 2^31 elements and 2^32 bytes.

In a pool's range one layer's blocks lie across the whole range, so a kernel whose offsets have 32 bits works
in a cache of vLLM's own layout and not here. A range needs no memory where nothing is mapped.
"""

import torch

from gpu.rig import GpuRig
from rose.measure.figures import Figure

RANGE_BYTES = 9 << 30


def measure(rig: GpuRig) -> list[Figure]:
    """Counts, for each operation, the elements that are wrong at the range's far end."""
    slab_bytes = rig.slab_bytes(2)
    num_positions = RANGE_BYTES // slab_bytes
    last = num_positions - 1
    range_ = rig.backend.create(2, slab_bytes, "kit").reserve(num_positions)
    range_.map_many([0, last], [0, 1])
    rows = rig.tensor(range_).view(torch.bfloat16).view(num_positions, -1)
    assert rows.numel() > 1 << 32
    ids = torch.tensor([last, 0], device=rig.device)
    values = torch.stack([torch.full_like(rows[0], 3.0), torch.full_like(rows[0], 5.0)])
    wrong: dict[str, int] = {}

    def found(name: str) -> None:
        wrong[name] = int((rows[last] != 3.0).sum() + (rows[0] != 5.0).sum())
        rows[last].zero_()
        rows[0].zero_()

    rows.index_copy_(0, ids, values)
    found("index_copy")
    rows[ids] = values
    found("index_put")
    rows[last].copy_(values[0])
    rows[0].copy_(values[1])
    wrong["index_select"] = int((rows.index_select(0, ids) != values).sum())
    wrong["strided"] = int((rows.as_strided((2,), (last * rows.stride(0),)) != ids.new_tensor([5, 3])).sum())
    return [
        Figure(name=f"offset_wrong_elements[{name}]", value=count, unit="elements", target="0")
        for name, count in wrong.items()
    ]
