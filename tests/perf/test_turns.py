"""What a function ran behind does not count in its time."""

import pytest

from jaxscale.perf import turns


class Card:
    """A clock that functions advance: each call takes as long as the load lately allows."""

    def __init__(self, settles_in: float):
        self.now, self.settles_in = 0.0, settles_in
        self.running, self.since = "", 0.0
        self.calls: list[str] = []

    def function(self, name: str, *, first: float, settled: float):
        """first, settled: seconds of a call just behind another function, and later."""

        def call():
            if self.running != name:
                self.running, self.since = name, self.now
            has_settled = self.now - self.since >= self.settles_in
            self.now += settled if has_settled else first
            self.calls.append(name)

        return call


@pytest.fixture
def card(monkeypatch):
    card = Card(settles_in=0.9 * turns.SECONDS)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: card.now)
    return card


def test_a_function_is_timed_when_the_card_has_settled_for_it(card):
    heavy = card.function("heavy", first=0.006, settled=0.007)
    light = card.function("light", first=0.0084, settled=0.008)
    assert turns.in_turns({"heavy": heavy, "light": light}, ()) == pytest.approx(
        {"heavy": 7.0, "light": 8.0}
    )


def test_functions_take_turns_at_being_first_and_a_slow_one_is_called_no_more_than_it_takes(card):
    slow = card.function("slow", first=1.0, settled=1.0)
    fast = card.function("fast", first=turns.SECONDS / 12, settled=turns.SECONDS / 12)
    turns.in_turns({"slow": slow, "fast": fast}, ())
    calls = card.calls[2:]  # behind those that compile
    of_slow, of_fast = ["slow"] * 2 * turns.CALLS, ["fast"] * 32
    two_turns = of_slow + of_fast + of_fast + of_slow
    assert calls == two_turns * (turns.TIMINGS // 2) + of_slow + of_fast


def test_where_nothing_can_run_nothing_is_timed():
    assert turns.in_turns({}, ()) == {}
