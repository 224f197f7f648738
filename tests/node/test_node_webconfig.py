"""The web configuration: what it says is done or refused, over real handshakes and real hashes."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
import yaml
from node_certificates import Issued, authority, issue
from node_port import DEADLINE_SECONDS, FakeAnswers, connect, everything, get, node, serving, status, until

from diag.node import server as port
from diag.node.server import Server
from diag.node.server_connection import HEAD_SECONDS
from diag.node.web_users import MAX_WRONG, Users
from diag.node.webconfig import WebConfig
from hwr.errors import OptionError

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there")

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()


def written(directory: Path, text: str) -> Path:
    path = directory / "web.yml"
    path.write_text(text)
    return path


def basic(user: str, password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture(scope="session")
def issued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Issued]:
    at = tmp_path_factory.mktemp("certificates")
    ca, other = authority(at), authority(at, "stranger")
    return {
        "ca": ca,
        "other": other,
        "server": issue(at, ca, "server"),
        "renewed": issue(at, ca, "renewed", "DNS:renewed,IP:127.0.0.1"),
        "rsa": issue(at, ca, "rsa", rsa=True),
        "scraper": issue(at, ca, "scraper", "DNS:scraper.cluster"),
        "intruder": issue(at, other, "intruder", "DNS:scraper.cluster"),
    }


@pytest.fixture
def tls_files(tmp_path: Path, issued: dict[str, Issued]) -> Path:
    """A directory with cert.pem and cert.key, as an operator has it, and the authority beside."""
    shutil.copy(issued["server"].cert, tmp_path / "cert.pem")
    shutil.copy(issued["server"].key, tmp_path / "cert.key")
    shutil.copy(issued["ca"].cert, tmp_path / "ca.pem")
    return tmp_path


TLS = "tls_server_config:\n  cert_file: cert.pem\n  key_file: cert.key\n"


def client(issued: dict[str, Issued], with_: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(issued["ca"].cert))
    if with_ is not None:
        context.load_cert_chain(issued[with_].cert, issued[with_].key)
    return context


def asked(server: Server, context: ssl.SSLContext, *headers: str) -> tuple[bytes, ssl.SSLSocket]:
    """Ask for /livez over TLS; return the answer and the (closed) socket, which still knows its session."""
    with connect(server) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
        wrapped.sendall("\r\n".join(["GET /livez HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]).encode())
        return everything(wrapped), wrapped


def names(server: Server, context: ssl.SSLContext) -> set[str]:
    with connect(server) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
        certificate = wrapped.getpeercert() or {}
        return {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}  # type: ignore[misc]


# The file


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("basic_auth_user: {}", "basic_auth_user: is not known here"),
        ("tls_server_config: {cert_flie: a}", r"tls_server_config\.cert_flie: is not known"),
        ("- a\n- b", "the file: is no table"),
        ("tls_server_config: yes", "tls_server_config: is no table"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [true]", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("\x00", "not YAML"),
        ("basic_auth_users: {a: x}\nbasic_auth_users: {}", "comes twice"),
        ("basic_auth_users: {ann: secret}", r"basic_auth_users\.ann: is no bcrypt hash"),
        ("basic_auth_users: {1: x}", "put it in quotes"),
        (f"basic_auth_users: {{'a:b': '{HASH}'}}", "has a colon"),
        ("basic_auth_users: {ann: '$2y$31$" + "a" * 53 + "'}", "has cost 31"),
        ("http_server_config: {http2: true}", r"http_server_config\.http2"),
        ("http_server_config: {headers: {X-Other: a}}", r"headers\.X-Other: is not one of"),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", "may be deny or sameorigin"),
        ('http_server_config: {headers: {Content-Security-Policy: "a\\r\\nX: y"}}', "no printable ASCII"),
        ("tls_server_config: {cert_file: a}", "are both needed"),
        ("tls_server_config: {cert_file: a, key_file: b, cert: c}", "and cert too"),
        ("tls_server_config: {cert_file: none, key_file: none}", "none: ENOENT"),
        (TLS + "  min_version: TLS11", "TLS12 is the oldest"),
        (TLS + "  min_version: SSL3", "none of TLS12, TLS13"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12", "below min_version"),
        (TLS + "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", "cipher_suites"),
        (TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256]", "TLS 1.3 only"),
        (TLS + "  curve_preferences: [CurveP256, CurveP384]", "one curve"),
        (TLS + "  client_auth_type: RequireAnyClientCert", "without verifying"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert", "client_ca_file: .*needs it"),
        (TLS + "  client_ca_file: ca.pem", "no client certificate is asked for"),
        (TLS + "  client_ca_file: cert.key\n  client_auth_type: RequireAndVerifyClientCert", "no certificates"),
        (TLS + "  client_allowed_sans: [a]", "needs client_auth_type"),
        (TLS + "  prefer_server_cipher_suites: 1", "neither true nor false"),
        ("tls_server_config: {cert_file: cert.key, key_file: cert.pem}", "no certificate chain"),
    ],
)  # fmt: skip
@needs_openssl
def test_what_cannot_be_kept_is_refused_by_its_key(tls_files: Path, text: str, named: str) -> None:
    """Two lines: the file, the key and what is wrong; then where the format is described."""
    with pytest.raises(OptionError, match=rf"^--web-config: .*web\.yml: .*{named}") as refused:
        WebConfig.load(written(tls_files, text))
    assert str(refused.value).count("\n") == 1
    assert all(line.isprintable() for line in str(refused.value).splitlines())


def test_what_is_no_small_file_is_refused(tmp_path: Path) -> None:
    """A FIFO does not make it wait, a directory and a huge file are named."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"#" * (1 << 20))
    for name, problem in (("fifo", "no regular file"), ("large", "larger than 256 KiB"), (".", "no regular file|EISDIR"), ("no", "ENOENT")):
        with pytest.raises(OptionError, match=problem):
            WebConfig.load(tmp_path / name)


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    """As with the ecosystem's exporters: plain HTTP, no passwords, and not called protected."""
    config = WebConfig.load(written(tmp_path, "# nothing yet\ntls_server_config:\n"))
    assert (config.tls, config.users, config.headers, config.protected) == (None, {}, {}, False)


# Passwords


def test_every_path_needs_the_password(tmp_path: Path) -> None:
    """Without, with a wrong one, with another's: 401 and how to ask; with the right one all is served, and extra headers are sent."""
    web = WebConfig.load(
        written(
            tmp_path,
            yaml.safe_dump(
                {"basic_auth_users": {"ann": HASH}, "http_server_config": {"http2": False, "headers": {"x-frame-options": "deny"}}}
            ),
        )
    )
    assert web.protected
    with serving(FakeAnswers(node()), web) as server:
        for path in ("/metrics", "/livez", "/readyz", "/startupz", "/snapshot", "/", "/none"):
            wrong = ("", basic("ann", "Secret"), basic("bob", "secret"), "Authorization: Bearer secret", "Authorization: Basic ???")
            for header in wrong:
                answer = get(server, path, *([header] if header else []))
                assert status(answer) == 401
                assert b'WWW-Authenticate: Basic realm="' in answer
                assert b"X-Frame-Options: deny" in answer
            assert status(get(server, path, basic("ann", "secret"))) == (404 if path == "/none" else 200)


def test_a_name_that_does_not_exist_costs_as_much_as_a_wrong_password() -> None:
    """Both are hashed once at the users' own cost; right credentials are hashed once and then known."""
    users = Users({"ann": bcrypt.hashpw(b"secret", bcrypt.gensalt(8)).decode()})

    def seconds(credentials: bytes) -> float:
        begun = time.process_time()
        users.check(credentials)
        return time.process_time() - begun

    def header(name: str, password: str) -> bytes:
        return b"basic " + base64.b64encode(f"{name}:{password}".encode())

    known = min(seconds(header("ann", f"x{number}")) for number in range(5))
    unknown = min(seconds(header("bob", f"x{number}")) for number in range(5))
    assert 0.5 < unknown / known < 2.0
    right = header("ann", "secret")
    assert users.remembered(right) is None
    assert users.check(right)
    assert users.remembered(right) is True
    assert users.remembered(header("ann", "x0")) is False


def test_guesses_do_not_push_out_the_right_password() -> None:
    """Thousands of wrong ones take a bounded place, and the scraper's own is never hashed again."""
    users = Users({"ann": HASH})
    right = b"Basic " + base64.b64encode(b"ann:secret")
    assert users.check(right)
    for number in range(2 * MAX_WRONG):
        assert not users.check(b"Basic " + base64.b64encode(b"ann:%d" % number))
    assert users.remembered(right) is True
    assert users.remembered(b"Basic " + base64.b64encode(b"ann:0")) is None
    assert not users.check(b"Basic " + base64.b64encode(b"ann:" + b"s" * 5000))
    assert not users.check(b"Basic " + base64.b64encode(b"ann:se\x00cret"))
    assert not users.check(b"Basic " + base64.b64encode(b"ann"))


def test_hashes_of_htpasswd_are_known() -> None:
    """`$2y$`, which htpasswd and PHP write, is the same hash."""
    users = Users({"ann": "$2y" + HASH[3:]})
    assert users.check(b"Basic " + base64.b64encode(b"ann:secret"))


def test_a_storm_of_guesses_does_not_hold_up_the_scraper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While passwords queue for hashing the known one is served at once, and beyond a number guesses are sent away."""
    monkeypatch.setattr(port, "MAX_CHECKS", 4)
    digest = bcrypt.hashpw(b"secret", bcrypt.gensalt(9)).decode()
    web = WebConfig.load(written(tmp_path, yaml.safe_dump({"basic_auth_users": {"ann": digest}})))
    with serving(FakeAnswers(node()), web) as server:
        assert status(get(server, "/metrics", basic("ann", "secret"))) == 200
        with ThreadPoolExecutor(24) as pool:
            guesses = [pool.submit(get, server, "/metrics", basic("ann", f"guess{number}")) for number in range(24)]
            until(lambda: server.requests.get(503, 0) > 0 or all(one.done() for one in guesses), "some are sent away")
            begun = time.monotonic()
            assert status(get(server, "/metrics", basic("ann", "secret"))) == 200
            assert time.monotonic() - begun < 1.0
            found = {status(one.result()) for one in guesses}
        assert found == {401, 503}


def test_a_password_that_was_taken_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed file counts without a restart; one that makes no sense changes nothing, and is named."""
    monkeypatch.setattr(port, "REFRESH_SECONDS", 0.05)
    path = written(tmp_path, yaml.safe_dump({"basic_auth_users": {"ann": HASH}}))
    with serving(FakeAnswers(node()), WebConfig.load(path)) as server:
        assert status(get(server, "/livez", basic("ann", "secret"))) == 200
        path.write_text("basic_auth_users: {ann: }")
        until(lambda: status(get(server, "/livez", basic("ann", "secret"))) == 200 and server.web_problem, "the problem is named")
        assert "basic_auth_users.ann" in (server.web_problem or "")
        path.write_text(yaml.safe_dump({"basic_auth_users": {"bob": HASH}}))
        until(lambda: status(get(server, "/livez", basic("ann", "secret"))) == 401, "ann is refused")
        assert status(get(server, "/livez", basic("bob", "secret"))) == 200
        assert server.web_problem is None


def test_a_file_that_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    """The line is named, and nothing of what may be a key or a password is shown."""
    with pytest.raises(OptionError, match=r"not YAML: .*\(line 3\)") as refused:
        WebConfig.load(written(tmp_path, "basic_auth_users:\n  ann: [hunter2\n"))
    assert "hunter2" not in str(refused.value)


# TLS


@needs_openssl
def test_a_real_handshake(tls_files: Path, issued: dict[str, Issued]) -> None:
    """HTTPS answers, with TLS 1.3 and our certificate; who speaks plain HTTP to it is cut off and costs nobody anything."""
    with serving(FakeAnswers(node()), WebConfig.load(written(tls_files, TLS))) as server:
        assert server.url.startswith("https://")
        answer, session = asked(server, client(issued))
        assert status(answer) == 200
        assert session.version() in ("TLSv1.3", None)
        with connect(server) as plain:
            plain.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" not in everything(plain)
        assert status(asked(server, client(issued))[0]) == 200


@needs_openssl
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not there")
def test_curl_over_tls_with_a_password(tls_files: Path) -> None:
    """A client that nobody here wrote: the authority given, name and password given."""
    web = WebConfig.load(written(tls_files, TLS + f"basic_auth_users: {{ann: '{HASH}'}}\n"))
    with serving(FakeAnswers(node(artifacts=2000)), web) as server:
        curl = ["curl", "-sS", "-w", "%{http_code}", "-o", "/dev/null", "--cacert", str(tls_files / "ca.pem"), f"{server.url}/snapshot"]
        without = subprocess.run(curl, capture_output=True, timeout=20, check=True)
        given = subprocess.run([*curl, "-u", "ann:secret"], capture_output=True, timeout=20, check=True)
    assert (without.stdout, given.stdout) == (b"401", b"200")


@needs_openssl
def test_inline_certificates_need_no_file(tmp_path: Path, issued: dict[str, Issued]) -> None:
    """`cert` and `key` carry the text itself."""
    text = {"cert": issued["server"].cert.read_text(), "key": issued["server"].key.read_text()}
    web = WebConfig.load(written(tmp_path, yaml.safe_dump({"tls_server_config": text})))
    with serving(FakeAnswers(node()), web) as server:
        assert status(asked(server, client(issued))[0]) == 200


@needs_openssl
def test_a_renewed_certificate_counts_for_the_next_connection(
    tls_files: Path, issued: dict[str, Issued], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While only half of it is there the old one is served; afterwards the new one; an open connection lives on."""
    monkeypatch.setattr(port, "REFRESH_SECONDS", 0.05)
    with serving(FakeAnswers(node()), WebConfig.load(written(tls_files, TLS))) as server:
        context = client(issued)
        with connect(server) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as kept:
            assert names(server, context) == {"localhost"}
            shutil.copy(issued["renewed"].cert, tls_files / "cert.pem")
            until(lambda: names(server, context) == {"localhost"} and server.web_problem, "half of it is named")
            assert "does not belong" in (server.web_problem or "")
            shutil.copy(issued["renewed"].key, tls_files / "cert.key")
            until(lambda: names(server, context) == {"renewed"}, "the new one is served")
            assert server.web_problem is None
            kept.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.recv(100).startswith(b"HTTP/1.1 200")


@needs_openssl
def test_a_client_certificate_is_verified(tls_files: Path, issued: dict[str, Issued]) -> None:
    """Without one, or with a stranger's, there is no answer; a verified one comes in if it carries an allowed name."""
    text = TLS + "  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [scraper.cluster]\n"
    web = WebConfig.load(written(tls_files, text))
    assert web.protected
    with serving(FakeAnswers(node()), web) as server:
        assert status(asked(server, client(issued, "scraper"))[0]) == 200
        assert status(asked(server, client(issued, "rsa"))[0]) == 403
        for stranger in (None, "intruder"):
            try:
                answer, _ = asked(server, client(issued, stranger))
            except (ssl.SSLError, ConnectionError):
                answer = b""
            assert answer == b""


@needs_openssl
def test_versions_suites_and_curves_are_those_that_were_named(tls_files: Path, issued: dict[str, Issued]) -> None:
    """A handshake of the named kind works; of another it does not."""
    text = TLS + (
        "  min_version: TLS12\n  max_version: TLS12\n  curve_preferences: [CurveP384]\n  prefer_server_cipher_suites: false\n"
        "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, TLS_AES_128_GCM_SHA256]\n"
    )
    with serving(FakeAnswers(node()), WebConfig.load(written(tls_files, text))) as server:
        with connect(server) as plain, client(issued).wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
            assert wrapped.version() == "TLSv1.2"
            assert (wrapped.cipher() or ("",))[0] == "ECDHE-ECDSA-AES256-GCM-SHA384"
        for spoil in (_only_tls13, _only_p256, _only_aes128):
            context = client(issued)
            spoil(context)
            with connect(server) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(plain, server_hostname="127.0.0.1")


def _only_tls13(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3


def _only_p256(context: ssl.SSLContext) -> None:
    context.set_ecdh_curve("prime256v1")


def _only_aes128(context: ssl.SSLContext) -> None:
    context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")


@needs_openssl
def test_a_passphrase_is_refused_and_not_asked_for(tls_files: Path) -> None:
    """A key with a passphrase is named; nobody is asked on the terminal."""
    key = tls_files / "cert.key"
    locked = ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:abcd", "-out", tls_files / "locked.key"]
    subprocess.run(locked, check=True, capture_output=True, timeout=20)
    (tls_files / "locked.key").replace(key)
    with pytest.raises(OptionError, match="the key has a passphrase"):
        WebConfig.load(written(tls_files, TLS))


@needs_openssl
def test_silent_handshakes_do_not_lock_a_scraper_out(tls_files: Path, issued: dict[str, Issued], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that connect and never shake hands fill the house; a scraper is served all the same."""
    monkeypatch.setattr(port, "MAX_CONNECTIONS", 50)
    with serving(FakeAnswers(node()), WebConfig.load(written(tls_files, TLS))) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), DEADLINE_SECONDS) for _ in range(60)]
        until(lambda: server.connections == 50, "the house is full")
        begun = time.monotonic()
        for _ in range(3):
            assert status(asked(server, client(issued))[0]) == 200
        assert time.monotonic() - begun < 2.0
        silent[0].settimeout(HEAD_SECONDS / 2)
        assert silent[0].recv(1) == b"", "the first to come is the first to go, before its time is over"
        for one in silent:
            one.close()
