"""Which engine and rank a process is shown as."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_directories import seen

from diag.node.engines import MAX_ENGINES, OTHER, EngineNames
from diag.node.runs import Seen
from hwr.outcomes import Liveness, Role

DEAD = Liveness.DEAD


def names(engines: EngineNames, *workers: Seen) -> list[str]:
    """What each is called; in brackets if it is not shown."""
    placed = engines.assign(workers)
    assert len(placed) == len(workers)
    taken = [(placed[one.directory].engine, one.rank) for one in workers if placed[one.directory].shown]
    assert len(taken) == len(set(taken)), "an engine and rank is shown twice"
    return [placed[one.directory].engine if placed[one.directory].shown else f"({placed[one.directory].engine})" for one in workers]


def test_the_ranks_of_one_server_have_one_name() -> None:
    assert names(EngineNames(), *(seen(9 + rank, rank=rank) for rank in range(4))) == ["default"] * 4


def test_servers_that_do_not_clash_share_a_name() -> None:
    """Two runs with different ranks are one engine, as when each rank was started by itself."""
    assert names(EngineNames(), seen(1, rank=0, run="a"), seen(2, rank=1, run="b")) == ["default", "default"]


def test_a_second_server_gets_a_number_for_all_of_its_ranks() -> None:
    """Where one rank had to be numbered, the others of its run follow, though theirs is free."""
    first, second = seen(1, rank=0, run="a"), [seen(5, rank=0, run="b"), seen(6, rank=1, run="b")]
    assert names(EngineNames(), first, *second) == ["default", "default-2", "default-2"]


def test_names_stay_for_life() -> None:
    """The one that was first is gone: the second keeps its number, and the next one takes the name that is free."""
    engines, first, second = EngineNames(), seen(1, run="a"), seen(2, run="b")
    assert names(engines, first, second) == ["default", "default-2"]
    assert names(engines, second) == ["default-2"]
    assert names(engines, second, seen(3, run="c")) == ["default-2", "default"]


def test_a_new_process_takes_a_dead_ones_place_at_once() -> None:
    """In the same look: the dead one keeps its name, and is no longer shown."""
    engines = EngineNames()
    assert names(engines, seen(1)) == ["default"]
    assert names(engines, seen(1, liveness=DEAD)) == ["default"]  # until then, it is
    assert names(engines, seen(1, liveness=DEAD), seen(2)) == ["(default)", "default"]
    assert names(engines, seen(1, liveness=Liveness.EXITED), seen(2, liveness=DEAD), seen(3)) == ["(default)", "(default)", "default"]


def test_forked_children_of_one_server_are_told_apart() -> None:
    """Same run, same rank, all alive."""
    assert names(EngineNames(), *(seen(number) for number in (1, 2, 3))) == ["default", "default-2", "default-3"]


def test_a_restarted_reader_gives_the_same_names() -> None:
    """They follow from who started when, whatever the order in which they are listed."""
    workers = [seen(number, rank=number % 2, run=f"run{number // 2}") for number in range(10)]
    before = EngineNames().assign(workers)
    for chance in range(20):
        shuffled = workers[:]
        random.Random(chance).shuffle(shuffled)
        assert EngineNames().assign(shuffled) == before


def test_one_after_the_other_is_as_all_at_once() -> None:
    """A reader that saw them come gives what a restarted one gives."""
    workers = [seen(number, rank=0, run=f"run{number}") for number in range(6)]
    engines = EngineNames()
    for count in range(1, 7):
        placed = engines.assign(workers[:count])
    assert placed == EngineNames().assign(workers)


def test_eight_names_and_then_other() -> None:
    """The ninth and tenth engine share `other`, and of one rank only the newest is shown."""
    workers = [seen(number, engine=f"e{number}") for number in range(10)]
    assert names(EngineNames(), *workers) == [*(f"e{number}" for number in range(8)), "(other)", "other"]


def test_more_clashes_than_names_are_other() -> None:
    assert names(EngineNames(), *(seen(number) for number in range(9)))[-2:] == ["default-8", OTHER]


def test_the_names_of_the_dead_are_given_to_the_living() -> None:
    """Eight engines that came and went within the time that the dead are kept do not make `other` of the one that runs."""
    engines = EngineNames()
    dead = [seen(number, engine=f"e{number}", liveness=DEAD) for number in range(8)]
    assert names(engines, *dead) == [f"e{number}" for number in range(8)]
    found = names(engines, *dead, seen(9, engine="now"))
    assert found[-1] == "now"
    assert found[0] == "other"  # the oldest gave up its name
    assert names(engines, *dead, seen(9, engine="now")) == found


def test_tools_take_no_workers_place() -> None:
    """A tool is shown where no worker is, living or kept; and makes way for one that comes."""
    engines, tool = EngineNames(), seen(5, role=Role.TOOL)
    assert names(engines, tool) == ["default"]
    assert names(engines, tool, seen(6)) == ["(default)", "default"]
    assert names(EngineNames(), seen(1, liveness=DEAD), tool) == ["default", "(default)"]
    assert names(EngineNames(), seen(1), seen(9, role=Role.TOOL)) == ["default", "(default)"]
    assert names(EngineNames(), seen(4, role=Role.TOOL), tool) == ["(default)", "default"]  # two at once: the newest


def test_tools_of_eight_engines_leave_the_ninth_to_a_worker() -> None:
    tools = [seen(number, engine=f"t{number}", role=Role.TOOL) for number in range(8)]
    engines = EngineNames()
    names(engines, *tools)
    assert names(engines, *tools, seen(9, engine="server"))[-1] == "server"


def test_agents_are_not_shown_and_take_nothing() -> None:
    found = names(EngineNames(), seen(1, role=Role.AGENT), seen(2), *(seen(10 + number, engine=f"e{number}") for number in range(7)))
    assert found == ["(default)", "default", *(f"e{number}" for number in range(7))]


def test_a_journal_that_tells_its_engine_only_later_is_renamed() -> None:
    """A directory is seen before its first line is written: what it is shown as until then is not its name for life."""
    engines, server = EngineNames(), seen(1)
    assert names(engines, server, seen(2, told=False)) == ["default", "(default)"]
    assert names(engines, server, seen(2, engine="llm")) == ["default", "llm"]
    assert names(engines, server, seen(2, role=Role.TOOL, engine="default")) == ["default", "(default)"]


def test_a_journal_that_cannot_be_read_is_shown_where_there_is_room() -> None:
    assert names(EngineNames(), seen(1, told=False, liveness=Liveness.UNKNOWN)) == ["default"]


@pytest.mark.parametrize(
    ("engine", "name"), [("", "default"), ("  ", "default"), (" llm ", "llm"), ("a\x1b[31mb", r"a\x1b[31mb"), ("other", "other")]
)
def test_names_are_printable(engine: str, name: str) -> None:
    assert names(EngineNames(), seen(1, engine=engine)) == [name]


def test_long_names_are_cut() -> None:
    (name,) = names(EngineNames(), seen(1, engine="x" * 70_000))
    assert len(name) <= 65


WORKERS = st.lists(
    st.builds(
        seen,
        st.integers(0, 12),
        rank=st.integers(0, 2),
        engine=st.sampled_from(["default", "a", "b", "other", "default-2", "c", "d", "e", "f", "g"]),
        run=st.sampled_from(["x", "y", "z"]),
        liveness=st.sampled_from(Liveness),
        role=st.sampled_from(Role),
        told=st.booleans(),
    ),
    max_size=14,
    unique_by=lambda one: one.directory,
)


def live(workers: Iterable[Seen]) -> list[Seen]:
    return [one for one in workers if one.liveness is Liveness.ALIVE and one.role is Role.WORKER and one.state.res]


@settings(deadline=None, database=None, max_examples=200)
@given(looks=st.lists(WORKERS, min_size=1, max_size=4))
def test_whoever_comes_and_goes(looks: Sequence[Sequence[Seen]]) -> None:
    """At any time: nothing is shown twice, every living worker but those beyond the eight names is, names are few, and they stay."""
    engines = EngineNames()
    before: dict[object, str] = {}
    for workers in looks:
        names(engines, *workers)
        placed = engines.assign(workers)
        assert placed == engines.assign(workers)
        for one in live(workers):
            place = placed[one.directory]
            assert place.shown or place.engine == OTHER
            if (one.directory, one.engine) in before:
                assert place.engine == before[(one.directory, one.engine)]
        assert len({placed[one.directory].engine for one in workers if one.role is not Role.AGENT} - {OTHER}) <= MAX_ENGINES
        assert not any(placed[one.directory].shown for one in workers if one.role is Role.AGENT)
        before = {(one.directory, one.engine): placed[one.directory].engine for one in live(workers)}
