"""TLS, headers and passwords of the port, from the file that Prometheus's own exporters take.

Owns the reading of a web configuration (`tls_server_config`, `http_server_config`, `basic_auth_users`). Promises that every key is either
done or refused with its path: a setting that this server cannot keep never counts as kept. Refuses to look for a file that was not named,
and passwords in clear. Relative paths count from the file's own directory.

Refused, since the standard library's TLS cannot do it: HTTP/2, versions below TLS 1.2, more than one curve, X25519 alone, and client
certificates that are asked for and not verified.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from diag.node.web_tls import CIPHERS, CURVES, TLS13_CIPHERS, VERSIONS, ClientAuth, Pem, Tls, TlsProblem, read_small, tls_context
from hwr.errors import OptionError
from hwr.units import one_line, printable

OPTION: Final = "--web-config"
# The field's headers and the values that each may have; None: any.
HEADERS: Final[Mapping[str, tuple[str, ...] | None]] = {
    "Strict-Transport-Security": None,
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": None,
    "Content-Security-Policy": None,
}
# Each step doubles the time of a check; 16 takes about four seconds, and nobody's scraper waits longer.
MAX_BCRYPT_COST: Final = 16
_BCRYPT: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]+")
_REMEDY: Final = "See https://prometheus.io/docs/prometheus/latest/configuration/https/ and the node agent's page for what is kept."


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """What the file says; `users` are bcrypt hashes by name."""

    path: Path
    tls: Tls | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)

    @property
    def protected(self) -> bool:
        """Whether a stranger is refused: by a password, or for want of a verified certificate."""
        return bool(self.users) or (self.tls is not None and self.tls.client_auth is ClientAuth.REQUIRE_AND_VERIFY)

    @classmethod
    def load(cls, path: Path) -> WebConfig:
        """Read it, and check that its certificates can be served.

        Raises:
            OptionError: the file or what it names cannot be read, has an unknown key, or asks for what is not possible.
        """
        try:
            config = _config(path, _parsed(path))
            if config.tls is not None:
                tls_context(config.tls)
        except (_Refused, TlsProblem) as error:
            raise OptionError(option=OPTION, problem=f"{printable(str(path))}: {error}", remedy=_REMEDY) from error
        return config


class _Refused(ValueError):
    """A key and what is wrong with it."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice: the second would silently win, and it may be the weaker one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} comes twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _parsed(path: Path) -> Any:
    try:
        return yaml.load(read_small(path), Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, TlsProblem):
            raise
        raise _Refused(f"not YAML: {_yaml_problem(error)}") from error


def _yaml_problem(error: Exception) -> str:
    """Say what and in which line; the library's own text quotes the file, and that may be a key."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{one_line(error.problem or 'syntax', 200)} (line {error.problem_mark.line + 1})"
    return type(error).__name__


def _config(path: Path, value: Any) -> WebConfig:
    table = _table("", {} if value is None else value, {"tls_server_config", "http_server_config", "basic_auth_users"})
    return WebConfig(
        path=path,
        tls=_tls(path.parent, table.get("tls_server_config")),
        headers=_http(table.get("http_server_config")),
        users=_users(table.get("basic_auth_users")),
    )


_TLS_KEYS: Final = frozenset(
    {
        "cert_file", "key_file", "cert", "key", "client_ca_file", "client_ca", "client_auth_type", "client_allowed_sans", "min_version",
        "max_version", "cipher_suites", "curve_preferences", "prefer_server_cipher_suites",
    }
)  # fmt: skip


def _tls(base: Path, value: Any) -> Tls | None:
    at = "tls_server_config"
    table = _table(at, {} if value is None else value, _TLS_KEYS)
    if not table:
        return None
    cert, key = _pem(base, at, table, "cert", "cert_file"), _pem(base, at, table, "key", "key_file")
    if cert is None or key is None:
        _refuse(at, "cert_file and key_file (or cert and key) are both needed")
    client_ca = _pem(base, at, table, "client_ca", "client_ca_file")
    asked = _one_of(f"{at}.client_auth_type", table.get("client_auth_type") or "NoClientCert", {one.value for one in ClientAuth})
    auth = ClientAuth(asked)
    if auth in (ClientAuth.REQUEST, ClientAuth.REQUIRE_ANY):
        _refuse(f"{at}.client_auth_type", f"{auth} takes a certificate without verifying it, which this server does not do")
    if auth is ClientAuth.NONE and client_ca is not None:
        _refuse(f"{at}.client_auth_type", "a client_ca_file is given and no client certificate is asked for")
    if auth is not ClientAuth.NONE and client_ca is None:
        _refuse(f"{at}.client_ca_file", f"{auth} needs it")
    sans = _strings(f"{at}.client_allowed_sans", table.get("client_allowed_sans"))
    if sans and auth is not ClientAuth.REQUIRE_AND_VERIFY:
        _refuse(f"{at}.client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")
    low = _version(f"{at}.min_version", table.get("min_version"), "TLS12")
    high = _version(f"{at}.max_version", table.get("max_version"), "TLS13")
    if low > high:
        _refuse(f"{at}.max_version", "is below min_version")
    prefer = table.get("prefer_server_cipher_suites", True)
    if not isinstance(prefer, bool):
        _refuse(f"{at}.prefer_server_cipher_suites", "is neither true nor false")
    return Tls(
        cert=cert,
        key=key,
        client_ca=client_ca,
        client_auth=auth,
        client_allowed_sans=frozenset(sans),
        min_version=low,
        max_version=high,
        ciphers=_ciphers(f"{at}.cipher_suites", table.get("cipher_suites"), low),
        curve=_curve(f"{at}.curve_preferences", table.get("curve_preferences")),
        prefer_server_ciphers=prefer,
    )


def _pem(base: Path, at: str, table: Mapping[str, Any], inline: str, file: str) -> Pem | None:
    text, name = table.get(inline) or None, table.get(file) or None
    for key, given in ((inline, text), (file, name)):
        if given is not None and not isinstance(given, str):
            _refuse(f"{at}.{key}", "is no text")
    if text is not None and name is not None:
        _refuse(f"{at}.{file}", f"is given, and {inline} too")
    if text is not None:
        return Pem(where=f"{at}.{inline}", text=text)
    return None if name is None else Pem(where=f"{at}.{file}", path=base / name)


def _version(at: str, value: Any, default: str) -> ssl.TLSVersion:
    if value in (None, ""):
        return VERSIONS[default]
    if value in ("TLS10", "TLS11"):
        _refuse(at, f"{value} is broken and not spoken here; TLS12 is the oldest")
    return VERSIONS[_one_of(at, value, set(VERSIONS))]


def _ciphers(at: str, value: Any, low: ssl.TLSVersion) -> tuple[str, ...]:
    names = [_one_of(at, name, CIPHERS.keys() | TLS13_CIPHERS) for name in _strings(at, value)]
    chosen = tuple(CIPHERS[name] for name in names if name in CIPHERS)
    if names and not chosen and low < ssl.TLSVersion.TLSv1_3:
        _refuse(at, "names suites of TLS 1.3 only, which are always on: give min_version TLS13 instead")
    return chosen


def _curve(at: str, value: Any) -> str | None:
    names = [_one_of(at, name, set(CURVES) | {"X25519"}) for name in _strings(at, value)]
    if not names:
        return None
    if len(names) > 1 or names[0] not in CURVES:
        _refuse(at, f"one curve of {', '.join(CURVES)} can be chosen here, or none: then all, X25519 first")
    return CURVES[names[0]]


def _http(value: Any) -> dict[str, str]:
    at = "http_server_config"
    table = _table(at, {} if value is None else value, {"http2", "headers"})
    if table.get("http2", False) is not False:
        _refuse(f"{at}.http2", "HTTP/2 is not spoken here: say false, or leave it out; every scraper speaks HTTP/1.1")
    names = {name.lower(): name for name in HEADERS}
    given = table.get("headers")
    headers: dict[str, str] = {}
    for key, text in _table(f"{at}.headers", {} if given is None else given, None).items():
        name = names.get(key.lower())
        if name is None:
            _refuse(f"{at}.headers.{key}", f"is not one of {', '.join(HEADERS)}")
        if not isinstance(text, str) or not _HEADER_VALUE.fullmatch(text) or text != text.strip():
            _refuse(f"{at}.headers.{key}", "is no printable ASCII text")
        allowed = HEADERS[name]
        if allowed is not None and text.lower() not in allowed:
            _refuse(f"{at}.headers.{key}", f"may be {' or '.join(allowed)}")
        headers[name] = text
    return headers


def _users(value: Any) -> dict[str, str]:
    at = "basic_auth_users"
    users = _table(at, {} if value is None else value, None)
    for name, digest in users.items():
        if not name or ":" in name:
            _refuse(at, f"{name!r} can be nobody's name: it is empty or has a colon")
        found = _BCRYPT.fullmatch(digest) if isinstance(digest, str) else None
        if found is None:
            _refuse(f"{at}.{name}", "is no bcrypt hash ($2y$10$…; `htpasswd -nBC 10 NAME` makes one)")
        if not 4 <= int(found[1]) <= MAX_BCRYPT_COST:
            _refuse(f"{at}.{name}", f"has cost {found[1]}; 4 to {MAX_BCRYPT_COST} are taken")
    return users


def _table(at: str, value: Any, keys: set[str] | frozenset[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(at or "the file", "is no table of keys")
    for key in value:
        if not isinstance(key, str):
            _refuse(at or "the file", f"the key {key!r} is no text: put it in quotes")
        if keys is not None and key not in keys:
            _refuse(f"{at}.{key}" if at else key, f"is not known here; known: {', '.join(sorted(keys))}")
    return value


def _strings(at: str, value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        _refuse(at, "is no list of texts")
    return value


def _one_of(at: str, value: Any, allowed: set[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        _refuse(at, f"{value!r} is none of {', '.join(sorted(allowed))}")
    return value


def _refuse(at: str, problem: str) -> NoReturn:
    raise _Refused(f"{printable(at, 200)}: {one_line(problem, 1200)}")
