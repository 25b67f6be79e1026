"""The cache salt that keeps KV of different weights apart.

Owns: the salt's form. Promises: an engine never reuses KV that other weights made, even if the client sends a
salt of its own. Never does: decide which weights a request may use.
"""

import hashlib

from rose.scheduler.rollout.formats.bodies import Json
from rose.types import WeightVersion

MAX_SALT_CHARACTERS = 128
"""vLLM refuses longer salts, and salts that hold a '/'."""


def salted(body: Json, version: WeightVersion | None) -> Json:
    """Returns the body with the weight version in its cache salt; unchanged if the version is unknown."""
    if version is None:
        return body
    own = body.get("cache_salt")
    salt = f"{version.run_id}:{version.number}" if not own else f"{own}|{version.run_id}:{version.number}"
    if len(salt) > MAX_SALT_CHARACTERS:
        salt = hashlib.sha256(salt.encode()).hexdigest()
    return {**body, "cache_salt": salt}
