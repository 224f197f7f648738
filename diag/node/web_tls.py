"""TLS of the port: from settings to a context.

Owns the names of versions, suites and curves as the ecosystem's files spell them, and the reading of certificates and keys. Promises a
context or one named problem, never a question on a terminal for a key's passphrase. Refuses to follow what is no small regular file.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from hwr.errors import errno_text
from hwr.units import KIB, bytes_text, one_line, printable

MAX_FILE_BYTES: Final = 256 * KIB

VERSIONS: Final[Mapping[str, ssl.TLSVersion]] = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
# Go's names (crypto/tls, the suites that it calls secure, and the plain RSA ones that older versions list) and OpenSSL's.
CIPHERS: Final[Mapping[str, str]] = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}
# Always on with TLS 1.3, here and in Go: taken, and without effect in both.
TLS13_CIPHERS: Final = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
CURVES: Final[Mapping[str, str]] = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1"}


class ClientAuth(StrEnum):
    """What is asked of a client's certificate, in the ecosystem's words."""

    NONE = "NoClientCert"
    REQUEST = "RequestClientCert"
    REQUIRE_ANY = "RequireAnyClientCert"
    VERIFY_IF_GIVEN = "VerifyClientCertIfGiven"
    REQUIRE_AND_VERIFY = "RequireAndVerifyClientCert"


_VERIFY: Final[Mapping[ClientAuth, ssl.VerifyMode]] = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.VERIFY_IF_GIVEN: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRE_AND_VERIFY: ssl.CERT_REQUIRED,
}


class TlsProblem(ValueError):
    """A file or a setting that no context can be made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pem:
    """A certificate or a key: the text itself, or the file that has it."""

    where: str
    path: Path | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.text is None):
            raise ValueError("a PEM is a text or a file")

    def read(self) -> bytes:
        """Return the bytes."""
        return read_small(self.path) if self.path is not None else (self.text or "").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How TLS is to be spoken; `ciphers` (TLS 1.2) and `curve` are OpenSSL's names, empty and None its own choice."""

    cert: Pem
    key: Pem
    client_ca: Pem | None = None
    client_auth: ClientAuth = ClientAuth.NONE
    client_allowed_sans: frozenset[str] = frozenset()
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ciphers: tuple[str, ...] = ()
    curve: str | None = None
    prefer_server_ciphers: bool = True

    def __post_init__(self) -> None:
        if self.client_auth not in _VERIFY:
            raise ValueError("a client certificate that is asked for is verified")

    def files(self) -> tuple[Path, ...]:
        """Return the files that it is read from."""
        return tuple(one.path for one in (self.cert, self.key, self.client_ca) if one is not None and one.path is not None)


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Read certificate and key, and make a server's context.

    Raises:
        TlsProblem: one of them cannot be read or used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = tls.min_version, tls.max_version
    context.verify_mode = _VERIFY[tls.client_auth]
    context.set_alpn_protocols(["http/1.1"])
    if not tls.prefer_server_ciphers:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if tls.ciphers:
        context.set_ciphers(":".join(tls.ciphers))
    if tls.curve is not None:
        context.set_ecdh_curve(tls.curve)
    _load_chain(context, tls.cert, tls.key)
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(cadata=tls.client_ca.read().decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as error:
            raise TlsProblem(f"{tls.client_ca.where}: no certificates: {one_line(str(error))}") from error
    return context


def allowed(tls: Tls, certificate: Mapping[str, Any] | None) -> bool:
    """Say whether a client's verified certificate carries one of the names that may come in."""
    if not tls.client_allowed_sans:
        return True
    names = (certificate or {}).get("subjectAltName", ())
    return any(name in tls.client_allowed_sans for _, name in names)


def read_small(path: Path) -> bytes:
    """Read a whole small regular file.

    Raises:
        TlsProblem: it cannot be read, is no regular file, or is larger than any configuration or certificate.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for its writer
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TlsProblem(f"{printable(str(path))}: no regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsProblem(f"{printable(str(path))}: {errno_text(error)}") from error
    if len(data) > MAX_FILE_BYTES:
        raise TlsProblem(f"{printable(str(path))}: larger than {bytes_text(MAX_FILE_BYTES)}")
    return data


def _load_chain(context: ssl.SSLContext, cert: Pem, key: Pem) -> None:
    # The library takes file names only. What was read goes through memory: a text has no file, and a file could be another by now.
    with ExitStack() as stack:
        names = []
        for one in (cert, key):
            descriptor = os.memfd_create("hwr-pem", os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(one.read())
            names.append(f"/proc/self/fd/{descriptor}")
        try:
            context.load_cert_chain(names[0], names[1], password=_no_passphrase)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise TlsProblem(f"{cert.where} and {key.where}: {_said(error)}") from error


def _no_passphrase() -> str:
    """Stand in for the library's question on the terminal."""
    raise ValueError("the key has a passphrase; give one without")


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    return one_line(str(error)) if not isinstance(error, ssl.SSLError) else f"no certificate chain with its key: {error.reason or error}"
