"""A program that this process has compiled is not compiled again.

Three quarters of what tests/train/test_run.py compiles is the same few programs, a quarter of what
tests/inference does. JAX's own cache would not do: it reads programs back from files, see
conftest.py.
"""

import collections
import contextlib
import hashlib
from unittest import mock

from jax._src import compiler

# The last used. Each takes about 1 MiB.
NUM_KEPT = 500


@contextlib.contextmanager
def compiled_once():
    """Context: programs for CPUs that are equal but for names of operations are the same one."""
    compile, kept = compiler.backend_compile_and_load, collections.OrderedDict()

    def compile_or_take(backend, module, executable_devices, options, host_callbacks):
        def compiled():
            return compile(backend, module, executable_devices, options, host_callbacks)

        if backend.platform != "cpu" or host_callbacks:
            return compiled()
        key = key_of(module, executable_devices, options)
        if key not in kept:
            kept[key] = compiled()
            if len(kept) > NUM_KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    with mock.patch.object(compiler, "backend_compile_and_load", compile_or_take):
        yield


def key_of(module, devices, options):
    key = hashlib.sha256(module.operation.get_asm(enable_debug_info=False).encode())
    key.update(options.SerializeAsString())
    key.update(repr([(device.client.platform, device.id) for device in devices]).encode())
    return key.digest()
