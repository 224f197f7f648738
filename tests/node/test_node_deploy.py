"""What is offered for a service manager and a cluster: accepted by their own checkers, and true to the program."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from diag.node.command import DEFAULT_PORT, add_arguments
from diag.node.server_pages import PATHS, split_target, startup_query
from diag.node.webconfig import WebConfig
from hwr.telemetry.rundir import SHARED_RUN_DIR

DEPLOY = Path(__file__).parents[2] / "dashboards/deploy"
SYSTEMD = DEPLOY / "systemd"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# systemd's own scale: 0 is closed, 10 open; "OK" ends at 4.9. The rest is what the agent is for: ptrace, DAC, /proc, a socket.
MOST_EXPOSED = 2.5
READING = {"SYS_PTRACE", "DAC_READ_SEARCH"}


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not there")


def ran(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture(scope="module")
def unit() -> str:
    return (SYSTEMD / "hwr-agent.service").read_text()


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pod(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return spec["template"]["spec"] if document["kind"] == "DaemonSet" else spec  # type: ignore[no-any-return]


def pods() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, pod(one)) for path in MANIFESTS for one in documents(path) if one["kind"] in ("DaemonSet", "Pod")]


def agent(of: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in (*of["initContainers"], *of["containers"]) if one["name"] == "agent")  # type: ignore[no-any-return]


def chosen(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line of the agent as the program does, or fail."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(arguments)


# systemd


@needs("systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path, unit: str) -> None:
    """Every directive is known and makes sense, without a warning; only the program's place is another here."""
    path = tmp_path / "hwr-agent.service"
    path.write_text(unit.replace("/opt/hwr/bin/hwr", sys.executable))
    done = ran("systemd-analyze", "verify", "--man=no", path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs("systemd-analyze")
def test_systemd_finds_the_unit_closed(tmp_path: Path, unit: str) -> None:
    """Its own measure of exposure stays low; with one protection taken away it is higher."""
    path = tmp_path / "hwr-agent.service"

    def exposure(text: str) -> float:
        path.write_text(text.replace("/opt/hwr/bin/hwr", sys.executable))
        done = ran("systemd-analyze", "security", "--offline=true", "--no-pager", path)
        found = re.search(r"Overall exposure level .*: ([\d.]+)", done.stdout)
        assert found, done.stderr
        return float(found[1])

    assert exposure(unit) <= MOST_EXPOSED
    assert exposure(unit.replace("NoNewPrivileges=yes\n", "").replace("ProtectSystem=strict\n", "")) > exposure(unit)


def test_the_unit_gives_two_capabilities_and_hides_nothing_that_is_looked_at(unit: str) -> None:
    """It reads other users' processes; it may write into the run directory, make setgid directories there, and nothing else."""
    found = settings(unit)
    assert {name.removeprefix("CAP_") for name in found["AmbientCapabilities"][0].split()} == READING
    assert found["CapabilityBoundingSet"] == found["AmbientCapabilities"]
    assert (found["ProtectProc"], found["ProcSubset"], found["ProtectSystem"]) == (["default"], ["all"], ["strict"])
    assert found["ReadWritePaths"] == [str(SHARED_RUN_DIR)]
    assert found["RestrictSUIDSGID"] == ["no"]
    program, verb, *arguments = shlex.split(found["ExecStart"][0])
    assert (Path(program).name, verb) == ("hwr", "agent")
    assert (chosen(arguments).run_dirs, chosen(arguments).addr, chosen(arguments).port) == ([SHARED_RUN_DIR], "127.0.0.1", DEFAULT_PORT)


@needs("systemd-sysusers")
@needs("systemd-tmpfiles")
def test_user_and_directory_are_made(tmp_path: Path) -> None:
    """In a tree of its own: the user and its group, then /run/hwr with setgid and the sticky bit, in that group."""
    (tmp_path / "etc").mkdir()
    users = ran("systemd-sysusers", f"--root={tmp_path}", SYSTEMD / "hwr-sysusers.conf")
    assert (users.returncode, users.stderr.count("rror")) == (0, 0), users.stderr
    passwd = {line.split(":")[0]: line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    groups = {line.split(":")[0]: line.split(":")[2] for line in (tmp_path / "etc/group").read_text().splitlines()}
    assert passwd["hwr"][3] == groups["hwr"]
    assert passwd["hwr"][6].endswith("nologin")
    made = ran("systemd-tmpfiles", "--create", f"--root={tmp_path}", SYSTEMD / "hwr-tmpfiles.conf")
    assert made.returncode == 0, made.stderr
    facts = (tmp_path / "run/hwr").stat()
    assert (facts.st_mode & 0o7777, facts.st_uid, facts.st_gid) == (0o3770, 0, int(groups["hwr"]))


# Kubernetes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_takes_the_manifests(path: Path) -> None:
    """Every document is what the API's own schema says, with no field that it does not have."""
    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_field_that_does_not_exist_would_be_found() -> None:
    """The checker checks: a misspelt field is refused."""
    document = next(one for one in documents(DEPLOY / "kubernetes/sidecar.yaml") if one["kind"] == "Pod")
    document["spec"]["shareProcessNamespaces"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(("name", "of"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_agents_command_line_is_one(name: str, of: dict[str, Any]) -> None:
    """Its arguments parse; what it is told to read is mounted, the store read-only; what it listens on is what the port says."""
    container = agent(of)
    verb, *arguments = container["args"]
    options = chosen(arguments)
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert (container["command"], verb, options.addr) == (["hwr"], "agent", "0.0.0.0")
    assert options.web_config.parent == Path("/etc/hwr")
    assert {str(path) for path in (*options.run_dirs, *(options.roots or ()))} <= set(mounts)
    assert all(one.get("readOnly") for path, one in mounts.items() if path != str(SHARED_RUN_DIR))
    assert container["ports"][0]["containerPort"] == options.port == DEFAULT_PORT
    assert {one["name"] for one in of["volumes"]} >= {one["name"] for one in container["volumeMounts"]}


@pytest.mark.parametrize(("name", "of"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_nobody_has_more_than_is_needed(name: str, of: dict[str, Any]) -> None:
    """No privilege, no token, a read-only root; two capabilities for the agent of a node, none beside a worker of its own user."""
    assert of["automountServiceAccountToken"] is False
    for container in (*of["initContainers"], *of["containers"]):
        context = container["securityContext"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    added = set(agent(of)["securityContext"]["capabilities"].get("add", ()))
    if name == "daemonset.yaml":
        assert (of["hostPID"], added) == (True, READING)
        assert agent(of)["securityContext"]["runAsUser"] == 0, "another user's added capabilities are not in effect"
    else:
        assert (of["shareProcessNamespace"], of.get("hostPID"), added) == (True, None, set())


@pytest.mark.parametrize(("name", "of"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_probe_asks_for_what_is_served(name: str, of: dict[str, Any]) -> None:
    """The path exists, its query makes sense, the scheme is that of the web configuration, and there are credentials."""
    probes = [
        one[kind]
        for one in (*of["initContainers"], *of["containers"])
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if kind in one
    ]
    assert len(probes) >= 3
    for probe in probes:
        path, query = split_target(probe["httpGet"]["path"])
        assert path in PATHS
        assert not isinstance(startup_query(query), str)
        assert probe["httpGet"].get("scheme", "HTTP") == ("HTTPS" if name == "daemonset.yaml" else "HTTP")
        assert [one["name"] for one in probe["httpGet"]["httpHeaders"]] == ["Authorization"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_web_configuration_in_the_secret_is_one(path: Path, tmp_path: Path) -> None:
    """The agent takes it, its files apart, which another Secret has; there are users, with real hashes."""
    text = next(one["stringData"]["web-config.yml"] for one in documents(path) if one["kind"] == "Secret")
    table = yaml.safe_load(text)
    tls = table.pop("tls_server_config", None)
    assert (tls is not None) == (path.name == "daemonset.yaml")
    if tls is not None:
        daemon = pod(next(one for one in documents(path) if one["kind"] == "DaemonSet"))
        sources = next(one for one in daemon["volumes"] if one["name"] == "web")["projected"]["sources"]
        projected = {item["path"] for one in sources for item in one["secret"].get("items", ())}
        assert {tls["cert_file"], tls["key_file"]} == projected
    (tmp_path / "web-config.yml").write_text(yaml.safe_dump(table))
    config = WebConfig.load(tmp_path / "web-config.yml")
    assert set(config.users) == {"prometheus", "probe"}
    assert config.protected


def test_the_drop_in_of_the_readme_is_one_too() -> None:
    """Its command line parses, and opens the address filter with the address."""
    text = (DEPLOY / "README.md").read_text()
    lines = settings(text)
    _, verb, *arguments = shlex.split(lines["ExecStart"][1])
    assert (verb, lines["IPAddressDeny"]) == ("agent", [""])
    assert chosen(arguments).addr == "0.0.0.0"
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DEPLOY / link).exists(), link
