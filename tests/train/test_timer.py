import jax

from jaxscale.train import timer
from jaxscale.train.timer import Timer


def test_it_is_up_once_each_time():
    now = [0.0]
    clock = Timer(10, clock=lambda: now[0])
    assert not clock.is_up()
    now[0] = 11
    assert clock.is_up() and not clock.is_up()
    now[0] = 20
    assert not clock.is_up()
    now[0] = 21
    assert clock.is_up()


def test_with_votes_of_the_call_before_it_is_up_once_too(monkeypatch):
    """As `any_process` answers with several processes."""
    votes = [False]

    def late(flag):
        def answer():
            votes.append(flag())
            return votes[-2]

        return answer

    monkeypatch.setattr(timer, "any_process", late)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    now = [0.0]
    clock = Timer(10, clock=lambda: now[0])
    answers = []
    for _ in range(60):
        now[0] += 1
        answers.append(clock.is_up())
    assert sum(answers) == 5
