"""The installed jaxlib is asked for its options, and another one's names are translated."""

from importlib import metadata

import pytest

from jaxscale.xla import jaxlib

JAXLIB = f"jaxlib {metadata.version('jaxlib')}"


@pytest.mark.parametrize(
    "pair", jaxlib.TRANSLATIONS.items(), ids=lambda pair: f"{pair[0][0]}={pair[0][1]}"
)
def test_another_jaxlibs_name_is_translated_into_the_one_that_this_has(pair, caplog):
    assert [jaxlib.refusal(*spelling) is None for spelling in pair].count(True) == 1
    (here,) = (spelling for spelling in pair if jaxlib.refusal(*spelling) is None)
    for name, value in pair:
        caplog.clear()
        assert jaxlib.as_installed(name, value) == dict([here])
        line = f"compiler option {name}={value} is {here[0]}={here[1]} in {JAXLIB}"
        assert caplog.messages == ([] if (name, value) == here else [line])


def test_the_names_for_hints_are_those_the_compiler_knows():
    names = jaxlib.known_names()
    assert len(names) > 300 and "xla_gpu_enable_triton_gemm" in names
    # "?" is a value of strings only: either way the name is known.
    assert not [name for name in names if jaxlib.refusal(name, "?") == jaxlib.UNKNOWN]


def test_a_jaxlib_that_cannot_be_asked_takes_the_option(monkeypatch):
    from jaxlib import xla_client

    monkeypatch.setattr(xla_client, "DeviceList", None)
    option = ("xla_gpu_autotune_max_solutions", "7")
    assert jaxlib.as_installed(*option) == dict([option])
    jaxlib.refusal.cache_clear()
