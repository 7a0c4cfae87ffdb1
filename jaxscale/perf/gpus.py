"""This machine's GPUs as nvidia-smi tells of them, without touching them."""

import os

from jaxscale import gpu_facts


def gpu_names() -> list[str]:
    """Of the GPUs that a run here would see; none where JAX is told to use the CPU."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    names = _query("name")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    return names[: len([part for part in visible.split(",") if part.strip()])]


def used_memory_gib() -> float | None:
    """Of the fullest GPU; None if nvidia-smi does not say."""
    used = [mib for text in _query("memory.used") if (mib := gpu_facts.number(text)) is not None]
    return max(used) / 1024 if used else None


def driver_version() -> str | None:
    """None where there is no driver."""
    return next(iter(_query("driver_version")), None)


def _query(field: str) -> list[str]:
    return [row[field] for row in gpu_facts.query([field])]
