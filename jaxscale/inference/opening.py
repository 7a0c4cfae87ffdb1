"""The flags with which scripts name a trained model, and the model that they name."""

from typing import TYPE_CHECKING

from absl import flags

if TYPE_CHECKING:
    from jaxscale.data.tokenizer import Tokenizer
    from jaxscale.inference.engine import Engine

# What is defined here is in the --help of the script that asks for it.
flags.disclaim_key_flags()

# What they are called where jaxscale speaks of a run's settings.
FLAG_OF_SETTING = {"config.data.tokenizer": "--tokenizer"}


class ModelFlags:
    """--workdir, --step, --hf, --tokenizer and --dtype of a script, defined when this is made."""

    def __init__(self) -> None:
        self._workdir = flags.DEFINE_string(
            "workdir", None, "A run's folder, for its newest checkpoint."
        )
        self._step = flags.DEFINE_integer("step", None, "Of the run's checkpoints this one.")
        self._hf = flags.DEFINE_string("hf", None, "A model folder of Hugging Face.")
        self._tokenizer = flags.DEFINE_string(
            "tokenizer", None, "'bytes', or a tokenizer.json or its folder, if not the model's own."
        )
        self._dtype = flags.DEFINE_enum(
            "dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of matrix products."
        )

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return str(self._hf.value or self._workdir.value)

    def open(self) -> "tuple[Engine, Tokenizer]":
        """Sets what must be set before JAX starts, and reads the weights. Raises ValueError."""
        # Here: a mistake among the flags is told before JAX is there.
        from jaxscale import distributed
        from jaxscale.config import Dtype
        from jaxscale.data.tokenizer import open_tokenizer
        from jaxscale.inference.engine import Engine
        from jaxscale.inference.weights import open_weights
        from jaxscale.xla.cache import enable_compilation_cache
        from jaxscale.xla.environment import set_environment

        set_environment()
        weights = open_weights(
            workdir=self._workdir.value, hf=self._hf.value, step=self._step.value
        )
        tokenizer = open_tokenizer(self._tokenizer.value or weights.tokenizer)
        distributed.describe()  # refuses a platform that is not here
        enable_compilation_cache()
        return Engine(weights, dtype=Dtype(self._dtype.value)), tokenizer
