"""A folder with a small run, in which scripts are asked what a user would ask of them."""

import shlex

import pytest

from jaxscale.models import families, model_folder
from tests.inference.hf_folders import make_golden, record_of
from tests.mistakes.said import write_run


@pytest.fixture(scope="session")
def folder(forks, tmp_path_factory):
    """config.py and text/; the finished run of them is in run/."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_run(folder)
    answer = forks.run("train", "--config=config.py", "--workdir=run", folder=folder)
    assert answer.code == 0, answer.err
    return folder


@pytest.fixture(scope="session")
def hf(folder):
    """A sound model folder."""
    record = record_of("llama3.1")
    config = record["config"] | {"vocab_size": 300}
    model = model_folder.model_of(config)
    shapes = {t.name: t.shape for t in families.of_config(model).hugging_face_names(model)}
    weights = make_golden.draw(shapes, seed=0, norm=record["norm"])
    model_folder.write(folder / "hf", weights.items(), dtype="float32", config_json=config)
    return folder / "hf"


@pytest.fixture(scope="session")
def asked(forks, folder):
    """`asked("generate --workdir=run") -> Answer`; variables of its environment by name."""

    def asked(line, **environment):
        script, *words = shlex.split(line)
        return forks.run(script, *words, folder=folder, **environment)

    return asked
