"""Variants of a training update, as a command line names them: a name, a colon and settings."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from jaxscale import config as run_config
from jaxscale.command_line import read_config
from jaxscale.config import Config

NAME = re.compile(r"\w[\w.-]*")  # also of a folder
SETTING = re.compile(r"\w[\w.]*=\S*")
# XLA's options, and JAX's optimization_level; xla_options is a key of the config.
OPTION = re.compile(r"xla_(?!options=)|optimization_level=")
# These parts of the config choose the batches, or the update does not know of them.
COMMON = (
    "batch_size",
    "seq_len",
    "seed",
    "data",
    "steps",
    "checkpoint",
    "evaluation",
    "sample",
    "log",
    "profile",
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """settings: "key=value" each. pair: of one that `with_pairs` made, the names of its two."""

    name: str
    settings: tuple[str, ...]
    pair: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"--variant={': '.join(filter(None, [self.name, ' '.join(self.settings)]))!r}"

    @property
    def compiler_options(self) -> list[str]:
        return [setting for setting in self.settings if OPTION.match(setting)]

    @property
    def changes(self) -> list[str]:
        """Of the config."""
        return [setting for setting in self.settings if not OPTION.match(setting)]


def read_variants(texts: Sequence[str]) -> list[Variant]:
    """Raises ValueError for what is no variant, for two of a name, and for none."""
    variants: list[Variant] = []
    for text in texts:
        name, _, settings = text.partition(":")
        variant = Variant(name.strip(), tuple(settings.split()))
        if mistake := _mistake_in(variant, variants):
            raise ValueError(f"--variant={text!r}: {mistake}")
        variants.append(variant)
    if not variants:
        raise ValueError("name the variants: --variant='base' --variant='full: remat=full' ...")
    return variants


def _mistake_in(variant: Variant, others: list[Variant]) -> str | None:
    if not NAME.fullmatch(variant.name):
        return "begin with a name of letters, digits, '_', '.' and '-', then ':'"
    if variant.name in [other.name for other in others]:
        return "there is another of this name; choose another name"
    for setting in variant.settings:
        if not SETTING.fullmatch(setting):
            return f"{setting!r} is no setting; write key=value, without spaces"
    return None


def with_pairs(variants: list[Variant]) -> list[Variant]:
    """The variants, then every two of them together, but for the first."""
    return [*variants, *_pairs_of(variants)]


def _pairs_of(variants: list[Variant]) -> Iterator[Variant]:
    """But for those that set one key twice, and those that the user has named."""
    known = {frozenset(variant.settings) for variant in variants}
    for one, other in itertools.combinations(variants[1:], 2):
        settings = tuple(dict.fromkeys((*one.settings, *other.settings)))
        keys = {setting.partition("=")[0] for setting in settings}
        if len(keys) == len(settings) and frozenset(settings) not in known:
            yield Variant(f"{one.name}+{other.name}", settings, pair=(one.name, other.name))


def config_of(variant: Variant, *, words: list[str], common: Config) -> Config:
    """The config of these words of a command line, which is `common`, as the variant changes it.

    Raises ValueError.
    """
    for setting in variant.changes:
        key = setting.partition("=")[0]
        run_config.check_key(common, key)
        if key.partition(".")[0] in COMMON:
            raise ValueError(
                f"config.{key} is the same for all variants: set it with --config.{setting}"
            )
        if key == "xla_options":
            raise ValueError(
                "config.xla_options: write the options alone, such as "
                "xla_gpu_enable_triton_gemm=false"
            )
    config = read_config([*words, *(f"--config.{setting}" for setting in variant.changes)])
    options = (*config.xla_options, *variant.compiler_options)
    return dataclasses.replace(config, xla_options=options)
