"""What happens within a child of `children.py`: what it hears, reads, and dies of."""

import json
import logging
import os
import random
import resource
import signal
import threading
import time
import zlib

import numpy as np


def prepare(
    heard: str,
    *,
    die_in_save: list | None = None,
    file_size: int | None = None,
    full_from: int = 0,
    poison: int | None = None,
) -> None:
    """heard: the file that gets what is logged, with the time.

    die_in_save: [seed, n]: at a random moment of the n-th save. file_size: of the largest file that
    can be written from the save of step full_from on, as on a full disk. poison: the step whose
    loss is NaN.
    """
    from jaxscale.checkpoint.checkpointer import Checkpointer
    from jaxscale.compile import fit

    handler = logging.Handler()
    handler.emit = lambda record: _write(heard, record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxscale").addHandler(handler)
    update, is_first = fit.CompiledUpdate.__call__, [True]

    def noted(self, state, batch, **limits):
        step, crc = int(state.step) + 1, zlib.crc32(np.asarray(batch.tokens).tobytes())
        _write(heard, f"batch of step {step}: {crc}")
        if step == poison:
            limits["loss_limit"] = np.float32(np.nan)
        out = update(self, state, batch, **limits)
        if is_first:
            is_first.clear()
            _write(heard, "first step")
        return out

    fit.CompiledUpdate.__call__ = noted  # type: ignore[method-assign]
    saves = [0]
    save = Checkpointer.save

    def dying(self, step, state, **options):
        saves[0] += 1
        if file_size is not None and step >= full_from:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
        if die_in_save and saves[0] == die_in_save[1]:
            _die_soon(self, random.Random(die_in_save[0]))
        return save(self, step, state, **options)

    Checkpointer.save = dying  # type: ignore[method-assign]


def _die_soon(checkpointer, draw: random.Random) -> None:
    """At one of the moments that the files have other names, or any time while they are written."""
    from jaxscale.checkpoint import checksums
    from jaxscale.checkpoint.folders import StepFolders

    def before(owner, name):
        original = getattr(owner, name)

        def method(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, method)

    moment = draw.choice(["any", "any", "any", "checksums", "publish", "retire", "sync"])
    if moment == "checksums":
        before(checksums, "write")
    elif moment == "sync":
        before(checksums, "compute")
    elif moment in ("publish", "retire"):
        before(StepFolders, moment)
    else:
        seconds = draw.uniform(0, 0.1)

        def kill():
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


def _write(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(json.dumps([time.time(), text]) + "\n")
