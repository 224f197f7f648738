"""The web configuration in force.

Owns which certificate, which users and which headers count at this moment, and what of a client is checked. Promises that a file which
changed counts for the next connection (a certificate that was renewed, a password that was taken away), and that one which became unusable
changes nothing, and is named once. Refuses to turn TLS on or off while it runs: whoever connects would be told the wrong scheme.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diag.node.web_tls import TlsProblem, allowed, tls_context
from diag.node.web_users import Users
from diag.node.webconfig import WebConfig
from hwr.errors import OptionError

_log: Final = logging.getLogger("hwr.node")


class WebGuard:
    """One port's guard; `refresh` is called by one thread at a time and reads files, the rest is quick.

    Raises (when made):
        OptionError: the certificates cannot be read any more.
    """

    def __init__(self, config: WebConfig) -> None:
        self._signature = _signature(config)
        self.config = config
        self.users = Users(config.users) if config.users else None
        self.problem: str | None = None
        self.context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        if config.tls is not None:
            try:
                self.context = tls_context(config.tls)
            except TlsProblem as error:
                raise OptionError(option="--web-config", problem=str(error), remedy="Look whether the files are still there.") from error

    @property
    def headers(self) -> Mapping[str, str]:
        """What is added to every answer."""
        return self.config.headers

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Say whether a client with this verified certificate may come in."""
        return self.config.tls is None or allowed(self.config.tls, certificate)

    def refresh(self) -> None:
        """Take what changed in the files since the last time."""
        with self._lock:
            signature = _signature(self.config)
            if signature == self._signature:
                return
            self._signature = signature
            try:
                config = WebConfig.load(self.config.path)
                if (config.tls is None) != (self.config.tls is None):
                    raise TlsProblem(f"{self.config.path}: TLS is turned on or off; that takes a restart")
                context = None if config.tls is None else tls_context(config.tls)
            except (OptionError, TlsProblem) as error:
                problem = error.cause if isinstance(error, OptionError) else str(error)
                if problem != self.problem:
                    _log.warning("the web configuration stays as it was: %s", problem)
                self.problem = problem
                return
            if config.users != self.config.users:
                self.users = Users(config.users) if config.users else None
            self.config, self.context, self.problem = config, context, None
            self._signature = _signature(config)


def _signature(config: WebConfig) -> tuple[tuple[int, ...], ...]:
    files = (config.path, *(config.tls.files() if config.tls is not None else ()))
    return tuple(map(_stamp, files))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        facts = os.stat(path)
    except OSError as error:
        return (-(error.errno or 1),)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
