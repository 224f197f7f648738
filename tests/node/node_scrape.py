"""A scraper as Prometheus is one: a connection that is kept, either format, and no series twice."""

from __future__ import annotations

import http.client
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from node_agents import Series, series_of
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

DEADLINE_SECONDS = 30.0
TEXT = "text/plain;version=0.0.4"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@dataclass(frozen=True, slots=True)
class Scraped:
    """One answer, and how long it took from the request's first byte to the body's last."""

    body: bytes
    content_type: str
    seconds: float

    def series(self) -> Series:
        """Parse it as what it says it is."""
        return samples(self.body, self.content_type)


@dataclass(frozen=True, slots=True)
class Latencies:
    """The seconds of many scrapes, in their order; two at least."""

    seconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """Return the time that this share of all scrapes stayed within."""
        return statistics.quantiles(self.seconds, n=1000, method="inclusive")[round(share * 1000) - 1]

    def told(self) -> dict[str, float]:
        """Return the figures worth telling."""
        return {"median": statistics.median(self.seconds), "p99": self.percentile(0.99), "max": max(self.seconds)}


class Scraper:
    """A client of one port; a context manager. Every answer must be 200 and come over the first connection."""

    def __init__(self, url: str, accept: str = TEXT) -> None:
        """`url` is where the agent listens, as it says itself; of its path nothing is taken."""
        place = urlsplit(url)
        self._accept = accept
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=DEADLINE_SECONDS)
        self._connection.connect()
        self._socket = self._connection.sock

    def scrape(self) -> Scraped:
        """Ask once."""
        begun = time.perf_counter()
        self._connection.request("GET", "/metrics", headers={"Accept": self._accept})
        answer = self._connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - begun
        assert answer.status == 200, (answer.status, body[:200])
        assert self._connection.sock is self._socket, "the connection was not kept"
        return Scraped(body, answer.headers.get("Content-Type", ""), seconds)

    def scrape_often(self, count: int) -> Latencies:
        """Ask again and again without a pause; the last answer is parsed, so that none of it stands twice."""
        answers = [self.scrape() for _ in range(count - 1)]
        last = self.scrape()
        last.series()
        return Latencies((*(answer.seconds for answer in answers), last.seconds))

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def samples(body: bytes, content_type: str) -> Series:
    """Return every sample of an exposition of either format; one that stands twice fails here, as a scraper would drop it silently."""
    text = body.decode()
    if not content_type.startswith("application/openmetrics-text"):
        return series_of(text)
    found: Series = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in openmetrics_families(text)
        for sample in family.samples
    }
    # Its parser drops a sample that stands twice in a row before anybody sees it: the lines tell.
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert len(lines) == len(found), f"{len(lines) - len(found)} of {len(lines)} samples stand twice"
    return found
