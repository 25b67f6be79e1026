"""What a relay holds: the keys, and the JSON bodies that make objects findable.

    rose/HEAD_RUN                        the run that was opened last               (replaced)
    rose/.runs/{run}                     a sign that the run's trainer is alive     (replaced)
    rose/{run}/HEAD                      newest version, and the chain to it        (replaced)
    rose/{run}/LAYOUT                    tensors, bucket size, adapter's config     (written once)
    rose/{run}/CLAIM                     the trainer that has opened the run last   (replaced)
    rose/{run}/OPENING                   the trainer that is to write HEAD first    (removed then)
    rose/{run}/{new}-{base}/{bucket}     one frame; base "none" for a snapshot      (written once)
    rose/{run}/{new}-{base}/MANIFEST     the version's buckets and state hash, put after its frames
    rose/{run}/{new}-{base}/PART{rank}   one trainer rank's share of the version, if there are several
    rose/{run}/{new}-none/FOLD           asks the relay to make this snapshot from its deltas
    rose/{run}/rank/{rank}               the shards that this trainer rank holds    (written once)
    rose/{run}/ack/{worker}              the version that a worker runs             (replaced)

Owns the names of the keys and these bodies. A manifest in the relay means that every frame it names is there,
and HEAD names only versions that have a manifest. Bad JSON raises RelayError. No I/O happens here.
"""

import os
import re
from typing import Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rose.errors import RelayError
from rose.ports import is_loopback
from rose.signature import Signer, body_of
from rose.transfer.format.layout import Layout, TensorCut, TensorSpec

HEAD_RUN_KEY = "rose/HEAD_RUN"
RUN_SIGNS = "rose/.runs/"
"""The folder of all runs' signs of life. No run id begins with a dot."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Model = TypeVar("Model", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadRun(_Body):
    """The newest run that a trainer opened on this relay."""

    run_id: str


class RunSign(_Body):
    """Changes again and again while the run's trainer is alive."""

    beat: int
    is_ended: bool


class Head(_Body):
    """How to reach the newest version: from the snapshot, or from any version since `oldest_base`."""

    writer: str
    """The publisher's process. Its versions only grow: a lower one comes from a relay copy that is behind."""
    version: int = Field(ge=0)
    snapshot: int = Field(ge=0)
    oldest_base: int = Field(ge=0)
    """The deltas from this version on are kept."""
    state_hash: str
    coming: int | None = None
    """The version that is being written, if there is one: its frames can be fetched ahead of its manifest."""


class CutBody(_Body):
    dim: int = Field(ge=0)
    points: tuple[int, ...]
    groups: tuple[int, ...]


class TensorBody(_Body):
    name: str
    dtype: str
    shape: list[int]
    cut: CutBody | None = None


class AdapterBody(_Body):
    """What a LoRA adapter is beside its tensors (rose.transfer.adapters.description)."""

    config: dict[str, JsonValue]
    """PEFT's adapter_config.json."""

    @property
    def base(self) -> str:
        """The name of the model that it was trained on."""
        return str(self.config["base_model_name_or_path"])

    @property
    def rank(self) -> int:
        return int(str(self.config["r"]))


class LayoutBody(_Body):
    """A Layout as JSON."""

    digest: str
    bucket_bytes: int = Field(gt=0)
    tensors: list[TensorBody]
    adapter: AdapterBody | None = None
    """None: the run's versions are whole weights."""
    config: dict[str, JsonValue] | None = None
    """What the trainer's config.json says of the architecture; None where it is not known."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        adapter: AdapterBody | None = None,
        config: dict[str, JsonValue] | None = None,
    ) -> Self:
        cuts = {
            name: CutBody(dim=cut.dim, points=cut.points, groups=cut.groups)
            for name, cut in layout.cuts.items()
        }
        tensors = [
            TensorBody(name=t.name, dtype=t.dtype, shape=list(t.shape), cut=cuts.get(t.name))
            for t in layout.tensors
        ]
        known = {"digest": layout.digest, "bucket_bytes": layout.bucket_bytes, "tensors": tensors}
        more = {"adapter": adapter, "config": config}
        return cls.model_validate({**known, **{key: each for key, each in more.items() if each is not None}})

    def to_layout(self) -> Layout:
        """Returns the Layout. Raises: RelayError when the digest does not belong to the table."""
        specs = [TensorSpec(name=t.name, dtype=t.dtype, shape=tuple(t.shape)) for t in self.tensors]
        cuts = {
            t.name: TensorCut(dim=t.cut.dim, points=t.cut.points, groups=t.cut.groups)
            for t in self.tensors
            if t.cut is not None
        }
        try:
            layout = Layout(specs, self.bucket_bytes, cuts)
        except ValueError as error:
            raise RelayError(f"layout {self.digest}: {error}") from error
        if layout.digest != self.digest:
            raise RelayError(f"layout has digest {layout.digest}, its body says {self.digest}")
        return layout


class BucketEntry(_Body):
    index: int = Field(ge=0)
    key: str
    num_bytes: int
    change: str
    """The change of the bucket's state hash. The changes of all entries add up to the version's, so that an
    entry which was left out is noticed.
    """
    digest: str | None = None
    """The frame's SHA-256, in a signed manifest."""


class Manifest(_Body):
    """One version as a delta, or as a snapshot when base is None. Unchanged buckets have no entry."""

    run_id: str
    version: int = Field(ge=0)
    base: int | None
    layout: str
    state_hash: str
    base_state_hash: str | None
    num_elements: int
    num_changed: int
    is_followed: bool
    """Whether a snapshot of this version comes next, which every trainer rank then writes its share of."""
    buckets: list[BucketEntry]


class ShardBody(_Body):
    """A region of a tensor that a trainer rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


class RankBody(_Body):
    """The shards that one of several trainer ranks holds."""

    shards: list[ShardBody]


class PartBody(_Body):
    """One trainer rank's buckets of a version that is not committed yet."""

    attempt: int
    num_changed: int
    buckets: list[BucketEntry]


class Fold(_Body):
    """The trainer's wish for a snapshot that the relay makes from an older one and the deltas since."""

    snapshot: int = Field(ge=0)


class Ack(_Body):
    """A worker's statement that it now runs a version."""

    worker: str
    version: int
    state_hash: str
    beat: int = 0
    """Counts how often the worker has said so again, which shows that it is there."""


def check_name(name: str, what: str) -> str:
    """Returns `name` if it can be part of a key and of a version string. Raises: ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must be 1-128 letters, digits, '.', '_' or '-'")
    return name


def worker_name(worker_url: str) -> str:
    """Returns the name under which a worker's subscriber acknowledges: the worker's host and port.

    Subscribers on several hosts have the same URL where an address reaches only the own machine: it is called
    by this machine's name.
    """
    bare = worker_url.split("://")[-1].strip("/")
    host = urlsplit(f"//{bare}").hostname or ""
    if is_loopback(host):
        bare = os.uname().nodename + bare.removeprefix(f"[{host}]").removeprefix(host)
    return check_name(re.sub(r"[^A-Za-z0-9._-]", "-", bare).lstrip("-._"), "worker name")


def run_sign_key(run_id: str) -> str:
    return RUN_SIGNS + run_id


def run_prefix(run_id: str) -> str:
    return f"rose/{run_id}/"


def head_key(run_id: str) -> str:
    return f"rose/{run_id}/HEAD"


def claim_key(run_id: str) -> str:
    return f"rose/{run_id}/CLAIM"


def opening_key(run_id: str) -> str:
    return f"rose/{run_id}/OPENING"


def layout_key(run_id: str) -> str:
    return f"rose/{run_id}/LAYOUT"


def version_prefix(run_id: str, version: int, base: int | None) -> str:
    return f"rose/{run_id}/{version}-{base if base is not None else 'none'}/"


def manifest_key(run_id: str, version: int, base: int | None) -> str:
    return version_prefix(run_id, version, base) + "MANIFEST"


def fold_key(run_id: str, version: int) -> str:
    return version_prefix(run_id, version, None) + "FOLD"


def fold_of(key: str) -> tuple[str, int] | None:
    """Returns the run and version of a Fold's key; None for the key of another object."""
    match = re.fullmatch(r"rose/([^/]+)/(\d+)-none/FOLD", key)
    return (match[1], int(match[2])) if match is not None else None


def is_version_key(key: str) -> bool:
    """Returns whether the key's object belongs to a version of a run: rose/{run}/{new}-{base}/..."""
    parts = key.split("/")
    return len(parts) == 4 and re.fullmatch(r"\d+-(\d+|none)", parts[2]) is not None


def bucket_key(run_id: str, version: int, base: int | None, bucket: int) -> str:
    return f"{version_prefix(run_id, version, base)}{bucket}"


def bucket_of(key: str) -> int | None:
    """Returns the bucket of a frame's key; None for the key of another object."""
    name = key.rpartition("/")[2]
    return int(name) if is_version_key(key) and name.isdecimal() else None


def rank_key(run_id: str, rank: int) -> str:
    return f"{rank_prefix(run_id)}{rank}"


def rank_prefix(run_id: str) -> str:
    return f"rose/{run_id}/rank/"


def part_key(run_id: str, version: int, base: int | None, rank: int) -> str:
    return f"{version_prefix(run_id, version, base)}PART{rank}"


def ack_prefix(run_id: str) -> str:
    return f"rose/{run_id}/ack/"


def is_ack_key(key: str) -> bool:
    """Returns whether the key's object is a worker's acknowledgement."""
    return re.fullmatch(rf"rose/{_NAME.pattern}/ack/{_NAME.pattern}", key) is not None


def pack_body(body: BaseModel) -> bytes:
    # What was left at its default is left out: releases that do not know it refuse it.
    return body.model_dump_json(exclude_unset=True).encode()


def sealed(signer: Signer | None, key: str, body: BaseModel) -> bytes:
    """Returns a body as it is stored under this key: signed where the run is."""
    data = pack_body(body)
    return signer.seal(key, data) if signer is not None else data


def unpack_body(data: bytes, model: type[Model], key: str) -> Model:
    """Returns the body in an object, signed or not. Raises: RelayError naming the key when the object is no
    such body.
    """
    try:
        return model.model_validate_json(body_of(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RelayError(f"{key}: not a {model.__name__}: {where} {first['msg']}") from error
