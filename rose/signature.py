"""Ed25519 signatures: a follower that has the trainer's public key takes only what the trainer has signed.

    rose-signed {signature, base64}\\n
    the body

Owns the form above, and the form of the keys: 32 bytes, as base64. A signature also covers the object's key,
so an object that was copied to another key is refused. A signed manifest has a SHA-256 digest of each frame,
because state hashes and checksums find faults but not forgeries. The version that a trainer announces to a
router is signed in the same way. The `cryptography` package, which comes with vLLM, is imported only where a
key is used.
"""

import hashlib
from base64 import b64decode, b64encode
from typing import Any

from rose.errors import ConfigError, RelayError
from rose.types import BytesLike

ANNOUNCED = "announced version"
"""In place of an object's key, for the version that a trainer announces to a router."""
_PREFIX = b"rose-signed "
_KEY_BYTES = 32


class Signer:
    """The trainer's side."""

    def __init__(self, signing_key: str) -> None:
        """Raises: ConfigError if the key is malformed, or without the `cryptography` package."""
        raw = _raw_key(signing_key, "signing key", "ROSE_SIGNING_KEY")
        self._private: Any = _ed25519().Ed25519PrivateKey.from_private_bytes(raw)

    @property
    def public_key(self) -> str:
        """The key with which followers verify, as base64."""
        return b64encode(self._private.public_key().public_bytes_raw()).decode()

    def seal(self, key: str, body: bytes) -> bytes:
        """Returns the body with its signature in front, to be stored under this key."""
        return _PREFIX + b64encode(self._private.sign(_signed(key, body))) + b"\n" + body


class Verifier:
    """A follower's side."""

    def __init__(self, public_key: str) -> None:
        """Raises: ConfigError if the key is malformed, or without the `cryptography` package."""
        raw = _raw_key(public_key, "public key", "ROSE_PUBLIC_KEY")
        self._public: Any = _ed25519().Ed25519PublicKey.from_public_bytes(raw)

    def require_signed(self, key: str, data: bytes) -> None:
        """Raises: RelayError unless the trainer has signed this object for this key."""
        from cryptography.exceptions import InvalidSignature

        if not data.startswith(_PREFIX):
            raise RelayError(f"{key} is not signed; set ROSE_SIGNING_KEY where the trainer starts")
        head, _, body = data.partition(b"\n")
        try:
            self._public.verify(b64decode(head.removeprefix(_PREFIX)), _signed(key, body))
        except (InvalidSignature, ValueError) as error:
            raise RelayError(f"{key} has a signature that does not belong to ROSE_PUBLIC_KEY") from error


def make_signing_key() -> str:
    """Returns a new signing key. Raises: ConfigError without the `cryptography` package."""
    return b64encode(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw()).decode()


def body_of(data: bytes) -> bytes:
    """Returns an object's body, whether it is signed or not. Checks no signature."""
    return data.partition(b"\n")[2] if data.startswith(_PREFIX) else data


def frame_digest(frame: BytesLike) -> str:
    """Returns the digest of a frame, as a signed manifest has it."""
    return hashlib.sha256(frame).hexdigest()


def _signed(key: str, body: bytes) -> bytes:
    return _PREFIX + key.encode() + b"\n" + body


def _raw_key(text: str, what: str, variable: str) -> bytes:
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        raw = b""
    if len(raw) != _KEY_BYTES:
        raise ConfigError(
            f"{variable}: a {what} is {_KEY_BYTES} bytes as base64; `rose relay --make-keys` prints a pair"
        )
    return raw


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError("signatures need the cryptography package: pip install cryptography") from error
    return ed25519
