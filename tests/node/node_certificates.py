"""Certificates made by the machine's own openssl: an authority, servers and clients."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Issued:
    cert: Path
    key: Path


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def authority(directory: Path, name: str = "authority") -> Issued:
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2)
    _openssl(*new, "-subj", f"/CN={name}", "-keyout", key, "-out", cert, "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    return Issued(cert, key)


def issue(directory: Path, by: Issued, name: str, san: str = "DNS:localhost,IP:127.0.0.1", *, rsa: bool = False) -> Issued:
    cert, key, request, extensions = (directory / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
    kind = ("rsa:2048",) if rsa else ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    _openssl("req", "-newkey", *kind, "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    extensions.write_text(f"subjectAltName={san}\nbasicConstraints=CA:FALSE\nauthorityKeyIdentifier=keyid\n")
    _openssl(
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        by.cert,
        "-CAkey",
        by.key,
        "-CAcreateserial",
        "-days",
        2,
        "-extfile",
        extensions,
        "-out",
        cert,
    )
    return Issued(cert, key)
