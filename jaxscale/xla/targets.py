"""What is shipped for the cards that jaxscale is measured on, in the folder `targets` beside this.

CARD.txtpb describes a card, for compiling where there is none. CARD-jaxlibVERSION.autotune.txtpb
holds autotune entries, XLA's choices by timing on such a card, as scripts/record_kernels.py writes
them. Their keys are hashes of card, code generators, CUDA's version and operation: what is not in
there is timed as ever.
"""

import re
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parent / "targets"


def description(card: str) -> str:
    """XLA's description of a card by its short name, 'h100'; ValueError for an unknown one."""
    names = sorted(path.stem for path in FOLDER.iterdir() if re.fullmatch(r"\w+\.txtpb", path.name))
    if card not in names:
        raise ValueError(f"target={card!r} is not one of {', '.join(names)}")
    return (FOLDER / f"{card}.txtpb").read_text()


def recorded_autotune(device_kind: str) -> Path | None:
    """The autotune entries of such a card and this jaxlib, if they have been recorded."""
    path = autotune_path(device_kind)
    return path if path is not None and path.exists() else None


def autotune_path(device_kind: str) -> Path | None:
    """Where the autotune entries of such a card and this jaxlib stand once they are recorded.

    None for a card whose name, as the driver gives it, has no word like the H100 of "NVIDIA H100
    80GB HBM3".
    """
    words = re.split(r"[\s-]", device_kind.lower())
    card = next((word for word in words if re.fullmatch(r"[a-z]+\d+", word)), None)
    return FOLDER / f"{card}-jaxlib{metadata.version('jaxlib')}.autotune.txtpb" if card else None
