"""Scripts run in forks of one process that has imported what they import: 0.1 s instead of 3 s."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each line of its input is a command. No thread may be alive at the fork; a JAX backend would bring
# some.
SERVER = """
import json, os, runpy, sys, traceback, warnings
import grain, jax, orbax.checkpoint, ml_collections
import jaxscale.train.loop
from jax._src import xla_bridge
from jaxscale.xla.environment import set_environment
set_environment()  # asks about XLA_FLAGS once instead of in every child, 0.3 s
warnings.simplefilter("ignore", RuntimeWarning)
assert not xla_bridge.backends_are_initialized()
for line in sys.stdin:
    output, folder, environment, argv = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(os.open(f"{output}.{descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv, code = argv, 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
            code = 99
        with open(f"{output}.json", "w") as file:
            json.dump([code, xla_bridge.backends_are_initialized()], file)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print(flush=True)
"""


@dataclasses.dataclass
class Answer:
    code: int
    touched_devices: bool
    out: str
    err: str


class Forks:
    """Context: the process that forks. outputs: the folder that gets what the scripts print."""

    def __init__(self, outputs: Path):
        self._outputs = (f"{outputs}/{number}" for number in itertools.count())

    def __enter__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error):
        self._server.__exit__(*error)  # closes its pipes and waits: without a line to read it ends
        assert self._server.returncode == 0

    def run(self, script: str, *words: object, folder: Path = ROOT, **environment: str) -> Answer:
        """`run("train", "--config=x.py")`: what scripts/train.py does in that folder."""
        output = next(self._outputs)
        argv = [str(ROOT / "scripts" / f"{script}.py"), *map(str, words)]
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([output, str(folder), environment, argv]) + "\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline(), "the process that forks has died"
        texts = [Path(f"{output}.{descriptor}").read_text() for descriptor in (1, 2)]
        return Answer(*json.loads(Path(f"{output}.json").read_text()), *texts)
