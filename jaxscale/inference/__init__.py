"""Using a trained model: text that continues prompts, and how likely text is.

`weights.py` opens a run's checkpoint or a model folder of Hugging Face; `engine.py` holds it on the
devices, with the keys and values of what it continues; `sampling.py` draws tokens; `text.py` makes
text of them; `serve.py` answers over HTTP; `score.py` says how likely text is, `harness.py` for
lm-evaluation-harness.
"""
