"""Where an adapter is read from: what is lent serves one read or none, and is given back exactly once."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nearline.engine.adapter_sources import READ_LIMIT_S, AdapterSources
from nearline.engine.adapters import ReadAdapter
from nearline.protocol import Digest, Extent
from nearline.protocol.frames import AdapterBytes, AdapterWanted, ExtentsFree

A, B = Digest("a"), Digest("b")
READ = ReadAdapter(A, "/store/a")


def lent(digest: Digest, lease_id: int) -> AdapterBytes:
    return AdapterBytes(digest, (Extent(4096 * lease_id, 10),), lease_id)


class Ends:
    """What the reader was given and the agent was told."""

    def __init__(self) -> None:
        self.started: list[tuple[ReadAdapter, AdapterBytes | None]] = []
        self.told: list[Any] = []
        self.sources = AdapterSources(lambda *read: self.started.append(read), self.told.append)


def test_what_is_lent_before_the_read_serves_it_and_no_other() -> None:
    ends = Ends()
    ends.sources.know(A, is_pooled=True)
    ends.sources.offer(lent(A, 1), 0.0)
    ends.sources.read(READ, 0.0)
    ends.sources.read(READ, 0.0)
    assert ends.started == [(READ, lent(A, 1))]
    assert ends.told == [AdapterWanted(A)]


def test_what_no_read_begins_with_is_given_back() -> None:
    ends = Ends()
    for digest in (A, B):
        ends.sources.know(digest, is_pooled=True)
    ends.sources.offer(lent(A, 1), 0.0)
    ends.sources.offer(lent(B, 2), 0.0)
    assert ends.told == []
    ends.sources.settle()
    ends.sources.read(READ, 0.0)
    assert ends.told == [ExtentsFree(1), ExtentsFree(2), AdapterWanted(A)]
    assert ends.started == []


def test_a_read_waits_for_the_answer_and_goes_to_the_directory_if_there_are_no_extents() -> None:
    ends = Ends()
    for digest in (A, B):
        ends.sources.know(digest, is_pooled=True)
        ends.sources.read(ReadAdapter(digest, "/store"), 0.0)
    ends.sources.offer(lent(A, 1), 0.0)
    ends.sources.offer(AdapterBytes(B, (), 0), 0.0)
    assert ends.started == [(ReadAdapter(A, "/store"), lent(A, 1)), (ReadAdapter(B, "/store"), None)]
    ends.sources.settle()
    assert [type(m) for m in ends.told] == [AdapterWanted, AdapterWanted]


def test_what_the_agent_does_not_keep_in_the_pool_is_read_from_its_directory() -> None:
    ends = Ends()
    ends.sources.know(A, is_pooled=False)
    ends.sources.read(READ, 0.0)
    assert (ends.started, ends.told) == ([(READ, None)], [])


def test_an_answer_that_comes_after_the_instance_has_gone_starts_nothing_and_is_given_back_at_once() -> None:
    """Without an instance no step is taken, and nothing settles."""
    ends = Ends()
    ends.sources.know(A, is_pooled=True)
    ends.sources.read(READ, 0.0)
    ends.sources.unbound()
    ends.sources.offer(lent(A, 1), 0.0)
    assert ends.started == []
    assert ends.told == [AdapterWanted(A), ExtentsFree(1)]


def test_a_read_that_nobody_answers_is_given_up_and_a_late_answer_is_given_back() -> None:
    ends = Ends()
    ends.sources.know(A, is_pooled=True)
    assert ends.sources.next_due is None
    ends.sources.read(READ, 5.0)
    due = 5.0 + READ_LIMIT_S
    assert ends.sources.next_due == due
    assert ends.sources.overdue(due - 0.1) == []
    assert ends.sources.overdue(due) == [A]
    assert (ends.sources.overdue(due), ends.sources.next_due) == ([], None)
    ends.sources.offer(lent(A, 1), 0.0)
    ends.sources.settle()
    assert ends.started == []
    assert ends.told == [AdapterWanted(A), ExtentsFree(1)]
    ends.sources.read(READ, due)
    ends.sources.offer(lent(A, 2), 0.0)
    assert ends.started == [(READ, lent(A, 2))], "asked for again it is read"


def test_a_read_under_way_is_awaited_until_it_has_ended_or_its_instance_is_gone() -> None:
    ends = Ends()
    for digest in (A, B):
        ends.sources.read(ReadAdapter(digest, "/store"), 0.0)
    assert ends.sources.overdue(10 * READ_LIMIT_S) == [], "the reader counts the time of reads"
    assert ends.sources.ended(B)
    assert not ends.sources.ended(B)
    ends.sources.unbound()
    assert not ends.sources.ended(A)


def test_an_answer_gives_those_asked_for_after_it_their_time_anew_and_not_those_before() -> None:
    """A disk that is busy answers in turn; what hangs is not kept alive by what comes after it."""
    ends = Ends()
    digests = [Digest(str(number)) for number in range(32)]
    for digest in (A, *digests):
        ends.sources.know(digest, is_pooled=True)
        ends.sources.read(ReadAdapter(digest, "/store"), 0.0)
    for number, digest in enumerate(digests):
        now = 2.0 + 2.0 * number
        assert ends.sources.overdue(now) == ([A] if now == READ_LIMIT_S else [])
        ends.sources.offer(lent(digest, number), now)
    assert [action.digest for action, _ in ends.started] == digests
    assert ends.sources.next_due is None


class SourcesMachine(RuleBasedStateMachine):
    """An agent that answers when it likes, more than once, or unasked; an engine that reads, settles and unbinds."""

    DIGESTS: ClassVar[Sequence[Digest]] = (A, B)

    def __init__(self) -> None:
        super().__init__()
        self.ends = Ends()
        self.offered: dict[int, Digest] = {}
        self.now = 0.0

    @rule(digest=st.sampled_from(DIGESTS), is_pooled=st.booleans())
    def know(self, digest: Digest, is_pooled: bool) -> None:
        self.ends.sources.know(digest, is_pooled)

    @rule(digest=st.sampled_from(DIGESTS), is_there=st.booleans())
    def offer(self, digest: Digest, is_there: bool) -> None:
        lease_id = len(self.offered) + 1
        if is_there:
            self.offered[lease_id] = digest
        self.ends.sources.offer(lent(digest, lease_id) if is_there else AdapterBytes(digest, (), 0), self.now)

    @rule(digest=st.sampled_from(DIGESTS))
    def read(self, digest: Digest) -> None:
        self.ends.sources.read(ReadAdapter(digest, digest), self.now)

    @rule(seconds=st.sampled_from([1.0, READ_LIMIT_S / 2, READ_LIMIT_S]))
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for digest in self.ends.sources.overdue(self.now):
            assert not self.ends.sources.ended(digest)

    @rule()
    def settle(self) -> None:
        self.ends.sources.settle()
        assert sorted(self.ended()) == sorted(self.offered), "an offer is kept"

    @rule()
    def unbind(self) -> None:
        self.ends.sources.unbound()
        num_started = len(self.ends.started)
        self.offer(A, is_there=False)
        self.offer(B, is_there=True)
        assert len(self.ends.started) == num_started
        assert sorted(self.ended()) == sorted(self.offered), "an offer is kept by an engine without an instance"

    def ended(self) -> list[int]:
        freed = [message.lease_id for message in self.ends.told if isinstance(message, ExtentsFree)]
        return freed + [read.lease_id for _, read in self.ends.started if read is not None]

    @invariant()
    def every_offer_ends_once_and_serves_its_own_adapter(self) -> None:
        ended = self.ended()
        assert len(ended) == len(set(ended))
        assert set(ended) <= set(self.offered)
        for action, read in self.ends.started:
            assert read is None or self.offered[read.lease_id] == read.digest == action.digest


TestSourcesMachine = SourcesMachine.TestCase
TestSourcesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
