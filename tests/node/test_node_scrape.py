"""The scraper that other tests measure with: it keeps its connection, reads both formats, and sees what stands twice."""

from __future__ import annotations

import pytest
from node_port import FakeAnswers, node, serving
from node_scrape import OPENMETRICS, TEXT, Latencies, Scraper, samples

UP = ("hwr_worker_up", (("engine", "default"), ("rank", "0")))


@pytest.mark.parametrize("accept", [TEXT, OPENMETRICS])
def test_many_scrapes_of_one_connection_are_timed_and_parsed(accept: str) -> None:
    """Each answer comes over the first connection, in the format that was asked for, and is parsed as that."""
    with serving(FakeAnswers(node())) as server, Scraper(f"http://127.0.0.1:{server.port}", accept) as scraper:
        latencies = scraper.scrape_often(20)
        last = scraper.scrape()
    assert len(latencies.seconds) == 20
    assert 0 < latencies.told()["median"] <= latencies.told()["p99"] <= latencies.told()["max"]
    assert last.content_type.partition(";")[0] == accept.partition(";")[0]
    assert last.series()[UP] == 1


@pytest.mark.parametrize(("accept", "end"), [(TEXT, ""), (OPENMETRICS, "# EOF\n")])
def test_a_series_that_stands_twice_is_refused(accept: str, end: str) -> None:
    """In either format, whatever its values are."""
    once = '# TYPE a gauge\na{b="1"} 1\n'
    assert samples(f"{once}{end}".encode(), accept) == {("a", (("b", "1"),)): 1.0}
    with pytest.raises((AssertionError, ValueError)):
        samples(f'{once}a{{b="1"}} 1\n{end}'.encode(), accept)


def test_a_connection_that_is_not_kept_is_refused() -> None:
    """A server that closes after each answer cannot pass for one that keeps the connection."""
    with serving(FakeAnswers(node())) as server, Scraper(f"http://127.0.0.1:{server.port}") as scraper:
        scraper.scrape()
        scraper._connection.close()
        with pytest.raises(AssertionError, match="not kept"):
            scraper.scrape()


def test_a_percentile_is_of_the_scrapes_as_they_were() -> None:
    """One slow scrape of a thousand shows in the longest, and not in the 99th percentile."""
    told = Latencies((*(0.001 for _ in range(999)), 1.0)).told()
    assert told["max"] == 1.0
    assert told["p99"] == pytest.approx(0.001)
