"""Trained weights: of a run's workdir, or of a model folder of Hugging Face."""

from pathlib import Path
from typing import Any, Protocol

import jax

from jaxscale import config as run_config
from jaxscale import distributed
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.config import Config
from jaxscale.models.model_folder import ModelFolder, companions_in
from jaxscale.step.pretrained import read_params
from jaxscale.step.relayout import Relayout, saved_lead
from jaxscale.train.workdir import COMPANIONS


class Weights(Protocol):
    """model: its Config. tokenizer: as config.data.tokenizer. companions: as a model folder has."""

    model: Any
    tokenizer: str
    companions: list[Path]

    def read(self, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Our parameters by path, in these dtypes and shardings."""
        ...


def open_weights(*, workdir: str | None, hf: str | None, step: int | None = None) -> Weights:
    """One of the two has to be given. Raises ValueError for a folder that is not what it says."""
    if bool(workdir) == bool(hf):
        raise ValueError("name one of --workdir=DIR (a run's) and --hf=DIR (a model folder)")
    if hf:
        if step is not None:
            raise ValueError(f"--step={step} is of a run's checkpoints; leave it out with --hf")
        return FolderWeights(ModelFolder(hf.removeprefix("hf:")))
    return RunWeights(Path(str(workdir)).expanduser(), step=step)


class FolderWeights:
    """Of a model folder of Hugging Face."""

    def __init__(self, folder: ModelFolder):
        self._folder, self.model, self.companions = folder, folder.model, folder.companions()
        self.tokenizer = str(folder.path)

    def read(self, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return read_params(abstract, self._folder)


class RunWeights:
    """Of the newest sound checkpoint of a run, or of `step`. Raises ValueError if there is none."""

    def __init__(self, workdir: Path, *, step: int | None = None):
        self.workdir, self._folder = workdir, workdir / "checkpoints"
        self.config: Config = read_run_config(workdir)
        self.model, self.tokenizer = self.config.model, self.config.data.tokenizer
        distributed.describe()  # refuses a platform that is not here, which Orbax asks for
        with self._checkpoints() as checkpoints:
            self.step = checkpoints.latest_step() if step is None else step
            if self.step is None:
                raise ValueError(f"{self._folder} holds no checkpoint; train first")
            checkpoints.metadata(self.step)
        kept = workdir / COMPANIONS
        beside = Path(self.tokenizer).expanduser()
        beside = beside if beside.is_dir() else beside.parent
        folder = kept if kept.is_dir() else beside if self.tokenizer != "bytes" else None
        self.companions = [] if folder is None else companions_in(folder)

    def read(self, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        names = {path: self._name(path) for path in abstract}
        part = {names[path]: leaf for path, leaf in abstract.items()}
        num_layers = self.model.num_layers
        with self._checkpoints() as checkpoints:
            assert self.step is not None
            saved = saved_lead(checkpoints.metadata(self.step), self.config)
            relayout = Relayout(saved, (num_layers,), num_layers=num_layers)
            values = checkpoints.restore_part(
                lambda leaves, _: relayout.as_saved(part, leaves), step=self.step
            )
        values = relayout.as_wanted(values, part)
        return {path: values[name] for path, name in names.items()}

    def _name(self, path: str) -> str:
        """In the saved state; parameters held fixed stand apart there."""
        is_frozen = any(part in path for part in self.config.frozen)
        return f"{'frozen' if is_frozen else 'params'}.{path}"

    def _checkpoints(self) -> Checkpointer:
        return Checkpointer(self._folder, keep_last=0)


def read_run_config(workdir: Path) -> Config:
    """The config.json of a run. Raises ValueError."""
    path = workdir / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--workdir={str(workdir)!r} holds no run: it has no config.json; name the --workdir "
            "of a run of scripts/train.py"
        )
    try:
        config = run_config.read_json(path)
    except ValueError as error:
        raise ValueError(
            f"--workdir={str(workdir)!r} holds no run that can be read: {path}: {error}"
        ) from None
    run_config.validate(config)
    return config
