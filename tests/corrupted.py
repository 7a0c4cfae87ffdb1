"""Arrays of which one device has something else than the others, as a fault of its memory does."""

import jax
import numpy as np


def with_flipped_bit(array, device, *, bit=0):
    """The array with one bit of this device's part changed, and of no other device's."""
    parts = []
    for shard in array.addressable_shards:
        value = np.array(shard.data)
        if shard.device == device:
            value.reshape(-1).view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
        parts.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
