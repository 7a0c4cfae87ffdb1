"""EleutherAI's lm-evaluation-harness asks a model of ours, on tasks that need no download."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.config import Dtype
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.inference.engine import Engine
from jaxscale.inference.sampling import Sampling
from jaxscale.inference.score import Passage, scores
from jaxscale.inference.text import Continuations
from jaxscale.models import llama
from jaxscale.perf.generate_speed import DrawnWeights

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENIZER = ByteTokenizer()
DOCUMENTS: list[dict[str, Any]] = [
    {"question": "The cat sat on the", "choices": [" mat", " moon", " idea"], "answer": 0},
    {"question": "Two and two is", "choices": [" five", " four", " none"], "answer": 1},
    {"question": "It rains, so the street is", "choices": [" dry", " loud", " wet"], "answer": 2},
]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def engine():
    model = llama.Config(
        vocab_size=257, model_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=96
    )
    return Engine(DrawnWeights(model), dtype=Dtype.FLOAT32, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def model(engine) -> Any:
    from jaxscale.inference.harness import JaxscaleLM

    return JaxscaleLM(engine, TOKENIZER, max_length=64)


def evaluate(model, text, folder):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (folder / "task.yaml").write_text(text.format(data=data))
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    name = text.split()[1]
    results = lm_eval.simple_evaluate(
        model=model, tasks=[name], task_manager=tasks, bootstrap_iters=0
    )
    return results["results"][name]


def nats(engine, context, continuation):
    known, judged = TOKENIZER.encode(context), TOKENIZER.encode(continuation)
    (score,) = scores(engine, [Passage(np.concatenate([known, judged]), first=len(known))])
    return score.loss


def test_the_accuracy_of_a_task_is_that_of_our_own_scores(engine, model, tmp_path):
    right = 0
    for document in DOCUMENTS:
        losses = [nats(engine, document["question"], choice) for choice in document["choices"]]
        right += int(np.argmin(losses)) == document["answer"]
    found = evaluate(model, CHOICE, tmp_path)
    assert found["acc,none"] == pytest.approx(right / len(DOCUMENTS))


def test_bits_a_byte_of_a_task_are_those_of_our_own_scores(engine, model, tmp_path):
    total, num_bytes = 0.0, 0
    for document in DOCUMENTS:
        tokens = np.array([256, *TOKENIZER.encode(document["question"])], np.int32)
        (score,) = scores(engine, [Passage(tokens)])
        total, num_bytes = total + score.loss, num_bytes + len(tokens) - 1
    found = evaluate(model, ROLLING, tmp_path)
    assert found["bits_per_byte,none"] == pytest.approx(total / np.log(2) / num_bytes, rel=1e-4)


def test_what_is_generated_ends_before_a_stop(engine, model):
    class Request:
        args = ("The cat", {"until": [], "max_gen_toks": 12})

    (whole,) = model.generate_until([Request])
    pieces = Continuations(
        engine, TOKENIZER, ["The cat"], sampling=Sampling(temperature=0.0), max_tokens=12
    )
    assert whole == "".join(piece for (piece,) in pieces)
    stop = whole[3:5]

    class Stopped:
        args = ("The cat", {"until": [stop], "max_gen_toks": 12})

    assert model.generate_until([Stopped]) == [whole[: whole.index(stop)]]
