"""A model folder of Hugging Face made into a run, before its first step."""

from pathlib import Path

from jaxscale import distributed
from jaxscale import sharding as shd
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.config import Config
from jaxscale.step.plan import corpus_of_run, plan_of_run
from jaxscale.step.pretrained import open_pretrained, with_pretrained
from jaxscale.step.state import init_state, to_flat
from jaxscale.train.run import metadata_of
from jaxscale.train.workdir import check_workdir, keep_companions, only_run, write_config


def import_model(config: Config, workdir: Path) -> None:
    """Saves the state that a run of this config begins with, config.init_from in it, as step 0.

    Raises ValueError if the workdir holds a checkpoint, and for what a run would refuse.
    """
    folder = open_pretrained(config)
    assert folder is not None, "config.init_from names one"
    check_workdir(workdir, config)
    corpus = corpus_of_run(config)
    distributed.describe()  # refuses a platform that is not here, which Orbax asks for
    with only_run(workdir), Checkpointer(workdir / "checkpoints", keep_last=1) as checkpoints:
        if (step := checkpoints.latest_step()) is not None:
            raise ValueError(f"--workdir={workdir} holds step {step}; choose another")
        plan = plan_of_run(config, corpus=corpus)
        with shd.use(plan.mesh, plan.rules):
            state = with_pretrained(init_state(plan), folder, plan=plan)
            write_config(workdir, config, saved_step=None)
            keep_companions(workdir, folder.companions())
            checkpoints.save(0, to_flat(state), metadata=metadata_of(config, corpus, plan=plan))
            checkpoints.wait()
