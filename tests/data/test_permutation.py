import numpy as np
import pytest

from jaxscale.data.permutation import derive_keys, permute


@pytest.mark.parametrize("sizes", [range(1, 260), [4096, 4097, 65535, 99_999]])
def test_permute_is_a_bijection_of_any_size(sizes):
    for size in sizes:
        found = permute(np.arange(size), size, keys=derive_keys(0, 1))
        np.testing.assert_array_equal(np.sort(found), np.arange(size))


def test_permute_does_not_depend_on_what_else_is_asked(size=1000):
    keys = derive_keys(3)
    whole = permute(np.arange(size), size, keys=keys)
    np.testing.assert_array_equal(
        permute(np.array([[7, 7], [999, 0]]), size, keys=keys), whole[[[7, 7], [999, 0]]]
    )


def test_permute_stays_distinct_and_in_range_at_the_size_of_a_large_store():
    size = 2**40 + 12_345
    numbers = np.concatenate([np.arange(10_000), np.arange(size - 10_000, size)])
    found = permute(numbers, size, keys=derive_keys(0))
    assert len(np.unique(found)) == len(numbers)
    assert 0 <= found.min() < size // 100 and size - size // 100 < found.max() < size


def test_keys_give_unrelated_orders():
    size = 10_000
    orders = [
        permute(np.arange(size), size, keys=derive_keys(seed, epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for number, order in enumerate(orders):
        # A random permutation keeps one place in expectation; it correlates by 1 / sqrt(size).
        for other in [np.arange(size), *orders[:number]]:
            assert (order == other).sum() < 10
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_values_are_fixed_for_good():
    """A change here gives every resumed run other data: it needs a new name, not a new value."""
    assert permute(np.arange(10), 10, keys=derive_keys(0, 0)).tolist() == [
        0,
        4,
        5,
        7,
        2,
        1,
        3,
        8,
        6,
        9,
    ]
    assert permute(np.arange(3), 10**9, keys=derive_keys(7, 2)).tolist() == [
        743034650,
        956369514,
        127129311,
    ]
