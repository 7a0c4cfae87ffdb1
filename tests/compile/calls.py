"""Calls of attention in compiled programs, whichever kernel it is."""

from jaxscale.compile import ahead

FORWARD = ("fmhaSoftmax", "flash_attention_forward")
BACKWARD = ("fmhaSoftmaxBackward", "flash_attention_backward")
# In a line of HLO.
IS_CALL = r'custom_call_target="(?:__cudnn\$|mosaic_gpu)'


def attention_calls(hlo: str) -> tuple[int, int]:
    """How many, (forward, backward)."""
    counts = ahead.count_calls(hlo)
    return sum(counts[name] for name in FORWARD), sum(counts[name] for name in BACKWARD)
