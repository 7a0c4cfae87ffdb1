"""What is shipped for a card is found by the names that its driver and a user give it."""

from importlib import metadata

import pytest

from jaxscale.xla import targets


def test_a_card_is_known_by_the_word_of_its_name():
    file = f"h100-jaxlib{metadata.version('jaxlib')}.autotune.txtpb"
    assert targets.autotune_path("NVIDIA H100 80GB HBM3") == targets.FOLDER / file
    assert targets.autotune_path("NVIDIA GeForce RTX 4090") is None
    assert targets.autotune_path("cpu") is None


def test_autotune_entries_are_found_where_they_were_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "FOLDER", tmp_path)
    assert targets.recorded_autotune("NVIDIA H200") is None
    path = targets.autotune_path("NVIDIA H200")
    assert path is not None
    path.touch()
    assert targets.recorded_autotune("NVIDIA H200") == path
    assert targets.recorded_autotune("cpu") is None


def test_cards_are_described_and_an_unknown_one_is_refused_with_those_there_are():
    for card in ("h100", "h200"):
        assert "device_memory_size: " in targets.description(card)
    # Files of autotune entries are no descriptions.
    with pytest.raises(ValueError, match=r"target='h999' is not one of h100, h200$"):
        targets.description("h999")
