"""What XLA and JAX are told before and around a run.

environment.py  environment variables and XLA_FLAGS, before JAX starts
options.py      the compiler options of a config, as data
jaxlib.py       what the installed jaxlib says of an option
targets.py      descriptions of cards, and autotune entries recorded on them
cache.py        the cache of compiled programs
"""
