"""The catalog as a state object: WS1, ST7, WS7, and calls that come twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relax.core.error import InvariantError, TransportError, UserError
from relax.core.version import Version
from relax.weights.catalog import Catalog, Deletion, Entry

HOLDERS = ("engine-0", "engine-1", "reference")


def entry(number: int, incarnation: int = 0, alias_of: int | None = None) -> Entry:
    source = number if alias_of is None else alias_of
    return Entry(
        Version(incarnation, number), f"digest {source}", 8, None if alias_of is None else Version(0, alias_of)
    )


def filled(*numbers: int, keep: int = 2) -> Catalog:
    catalog = Catalog(keep)
    for number in numbers:
        catalog.announce(entry(number))
    return catalog


def v(number: int, incarnation: int = 0) -> Version:
    return Version(incarnation, number)


@pytest.mark.parametrize("version", [v(3), v(5), v(2), v(0)])
def test_rule_ws1_numbers_rise_by_one(version: Version) -> None:
    catalog = filled(2, 3)
    with pytest.raises(InvariantError, match=r"\[WS1\].*publish v4"):
        catalog.announce(Entry(version, "other", 8))
    assert catalog.versions() == (v(2), v(3))


def test_rule_ws1_a_new_incarnation_may_begin_anywhere_and_ends_the_old_one() -> None:
    catalog = filled(6, 7)
    assert catalog.announce(entry(5, incarnation=1))
    assert catalog.newest == entry(5, incarnation=1)
    with pytest.raises(InvariantError, match=r"\[WS1\]"):
        catalog.announce(entry(8))


def test_an_announcement_that_comes_again_changes_nothing_and_another_of_that_name_is_refused() -> None:
    catalog = filled(0, 1)
    assert not catalog.announce(entry(1))
    assert not catalog.announce(entry(0))
    with pytest.raises(InvariantError, match="WS1"):
        catalog.announce(Entry(v(1), "other weights", 8))
    assert catalog.entry(v(1)) == entry(1)


def test_rule_ws7_only_the_newest_and_the_held_stay() -> None:
    catalog = filled(0)
    catalog.hold(v(0), "engine-0")
    catalog.hold(v(0), "engine-0")
    catalog.hold(v(0), "engine-1")
    for number in (1, 2, 3):
        catalog.announce(entry(number))
    assert catalog.forget() == [Deletion(v(1), v(1))]
    catalog.release(v(0), "engine-0")
    assert catalog.forget() == []
    assert catalog.holders(v(0)) == {"engine-1"}
    catalog.drop_holder("engine-1")
    assert catalog.forget() == [Deletion(v(0), v(0))]
    with pytest.raises(TransportError, match=r"v0 is not in the catalog \(it holds v2, v3\); fetch the newest"):
        catalog.hold(v(0), "engine-0")
    assert catalog.holders(v(0)) == frozenset()


def test_a_release_of_what_is_not_held_does_nothing() -> None:
    catalog = filled(0)
    catalog.hold(v(0), "engine-0")
    for version in (v(0), v(9)):
        catalog.release(version, "engine-1")
    assert catalog.holders(v(0)) == {"engine-0"}


def test_rule_st7_tensors_stay_while_an_alias_needs_them() -> None:
    catalog = filled(0, keep=1)
    for number in (1, 2):
        catalog.announce(entry(number, alias_of=0))
    assert catalog.forget() == [Deletion(v(0), None), Deletion(v(1), None)]
    assert catalog.num_bytes() == 8
    catalog.announce(entry(3))
    assert catalog.forget() == [Deletion(v(2), v(0))]


def test_rule_st7_an_alias_of_what_is_gone_is_refused() -> None:
    with pytest.raises(InvariantError, match=r"\[ST7\] version v4 cannot be an alias: v1 is not here"):
        filled(2, 3).announce(entry(4, alias_of=1))


def test_a_restored_catalog_goes_on_where_the_files_say() -> None:
    catalog = Catalog(2)
    catalog.restore([entry(9), entry(4, alias_of=2), entry(5)])
    assert catalog.versions() == (v(4), v(5), v(9))
    assert not catalog.announce(entry(9))
    with pytest.raises(InvariantError, match="WS1"):
        catalog.announce(entry(8))
    assert catalog.announce(entry(12)), "what was newest before may have been lost with the disk"
    with pytest.raises(InvariantError, match="WS1"):
        catalog.announce(entry(14))
    assert catalog.announce(entry(13))
    with pytest.raises(InvariantError, match="before anything is announced"):
        catalog.restore([])


def test_rule_ws7_a_holder_that_lives_on_says_what_it_holds_and_hears_what_is_gone() -> None:
    catalog = filled(0, 1, 2)
    catalog.hold(v(1), "engine-0")
    catalog.forget()
    assert catalog.reattach("engine-0", [v(2), v(0)]) == (v(0),)
    assert catalog.holders(v(1)) == frozenset()
    assert catalog.holders(v(2)) == {"engine-0"}


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"weights\.keep is 0"):
        Catalog(0)


class CatalogMachine(RuleBasedStateMachine):
    """Any order of calls, each perhaps twice: what is held or new is there, tensors are there for each version, the rest goes."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(2)
        self.tensors: set[Version] = set()
        self.manifests: list[Version] = []
        self.held: set[tuple[Version, str]] = set()

    @rule(alias=st.booleans(), lost=st.booleans(), twice=st.booleans())
    def announce(self, alias: bool, lost: bool, twice: bool) -> None:
        newest = self.catalog.newest
        version = Version(0, 0) if newest is None else newest.version.next()
        if lost and newest is not None:
            version = Version(newest.version.incarnation + 1, max(newest.version.number - 1, 0))
        source = newest.source if alias and newest is not None else None
        new = Entry(version, f"of {source or version}", 8, source)
        if source is None:
            self.tensors.add(version)
        self.manifests.append(version)
        for _ in range(1 + twice):
            self.catalog.announce(new)

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS), twice=st.booleans())
    def hold(self, data: st.DataObject, holder: str, twice: bool) -> None:
        if self.catalog.versions():
            version = data.draw(st.sampled_from(self.catalog.versions()))
            for _ in range(1 + twice):
                self.catalog.hold(version, holder)
            self.held.add((version, holder))

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def release(self, data: st.DataObject, holder: str) -> None:
        if self.held:
            version, _ = data.draw(st.sampled_from(sorted(self.held)))
            self.catalog.release(version, holder)
            self.held.discard((version, holder))

    @rule(holder=st.sampled_from(HOLDERS))
    def die(self, holder: str) -> None:
        self.catalog.drop_holder(holder)
        self.held = {pair for pair in self.held if pair[1] != holder}

    @rule()
    def forget(self) -> None:
        for deletion in self.catalog.forget():
            self.manifests.remove(deletion.version)
            if deletion.tensors is not None:
                self.tensors.remove(deletion.tensors)
        kept = {*self.manifests[-2:], *(version for version, _ in self.held)}
        assert set(self.manifests) == kept, "something was kept for nobody"
        assert self.tensors == {self.catalog.entry(version).source for version in kept}

    @invariant()
    def nothing_needed_is_gone(self) -> None:
        assert self.catalog.versions() == tuple(sorted(self.manifests))
        assert {self.catalog.entry(version).source for version in self.manifests} <= self.tensors
        assert {version for version, _ in self.held} <= set(self.manifests)


CatalogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_catalog_machine = CatalogMachine.TestCase
