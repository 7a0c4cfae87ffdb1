"""The families, and which of them a model is of."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxscale.models import decoder, gemma, llama

FAMILIES: tuple[ModuleType, ...] = (llama, gemma)


def of_config_json(hf: Mapping[str, Any]) -> ModuleType:
    """The file of the family that a config.json of Hugging Face names. Raises ValueError."""
    kind = hf.get("model_type")
    for family in FAMILIES:
        if kind in family.FAMILIES:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.FAMILIES)
    raise ValueError(f"model_type={kind!r} is no family of jaxscale; there are {known}")


def of_config(config: decoder.Config) -> ModuleType:
    """The file that the Config is defined in."""
    return sys.modules[type(config).__module__]
