"""The scripts' own flags, and what they are to read and to write."""

import socket

import pytest

from jaxscale.compile import ahead
from tests.mistakes.said import assert_mistake, content, write_store

ONE_OF = ("name one of --workdir=DIR", "--hf=DIR")
NO_RUN = ("holds no run: it has no config.json", "name the --workdir of a run")
NO_STEP = ("step=3 is not in", "it holds 2, 4")
WHOLE, NUMBER = "write a whole number", "write a number"

PREPARE = {
    "prepare_data --output=made": ("--input is missing", "see --help"),
    "prepare_data --input=text": ("--output is missing", "see --help"),
    "prepare_data --input= --output=made": ("--input=''", "finds no file"),
    "prepare_data --input=text --output=.": ("--output='.' names no store", "give a prefix"),
    "prepare_data --input=text --output=/proc/x/y": ("--output=/proc/x/y", "another --output"),
    "prepare_data --input=text --output=store": ("store.bin or .idx exists", "--overwrite"),
    "prepare_data --input=store --output=made": ("'store' is a token store already", "train on it"),
    "prepare_data --input=text --output=made --format=jsonl": ("set --format to what it holds",),
    "prepare_data --input=text --output=made --train_tokenizer=many": ("=many", WHOLE),
    "prepare_data --input=text --output=made --overwrite=maybe": ("=maybe", "write true or false"),
    "prepare_data --input=text --output=made --vocab_size=300": ("flag 'vocab_size'",),
    "prepare_data --input --output=made": ("--input has no value", "in front of --output=made"),
}
IMPORT = "convert_hf import --config=config.py --workdir=made"
CONVERT = {
    "convert_hf convert": ("'convert': write import or export first",),
    "convert_hf export run made": ("'export run made': write import or export first",),
    "convert_hf import": ("--hf is missing",),
    "convert_hf import --hf=hf --workdir=made": ("name a config: --config=FILE",),
    "convert_hf import --hf=hf --config=config.py": ("--workdir is missing",),
    f"{IMPORT} --hf=nowhere": ("config.model='hf:nowhere'", "has no config.json; name a folder"),
    f"{IMPORT} --hf=run": ("run/config.json: model_type=None is no family",),
    f"{IMPORT} --hf=hf --config.modle.mlp_dim=1": ("config.modle", "did you mean config.model?"),
    f"{IMPORT} --hf=hf --config.model.mlp_dim=64": (
        "mlp_dim: saved 48, now 64",
        "Set --config.model",
    ),
    f"{IMPORT} --hf=hf word": ("'word' is no flag", "--key=value"),
    "convert_hf export --workdir=run": ("--output is missing",),
    "convert_hf export --output=made": ("--workdir is missing",),
    "convert_hf export --workdir=text --output=made": ("--workdir='text'", *NO_RUN),
    "convert_hf export --workdir=run --output=text": ("'text' exists; name a new folder",),
    "convert_hf export --workdir=run --output=config.py/x": ("cannot be written", "another folder"),
    "convert_hf export --workdir=run --output=/proc/x": ("'/proc/x' cannot be written", "another"),
    "convert_hf export --workdir=run --output=made --dtype=int8": ("bfloat16|float16|float32",),
    "convert_hf export --workdir=run --output=made --step=3": NO_STEP,
    "convert_hf export --workdir=run --output=made --step=last": ("--step=last", WHOLE),
    "convert_hf export --workdir=run --output=made --config.steps=3": ("import or export first",),
}
GENERATE = {
    "generate --workdir=run --hf=run --prompt=x": ONE_OF,
    "generate --workdir= --prompt=x": ONE_OF,
    "generate --workdir=nowhere --prompt=x": ("--workdir='nowhere'", *NO_RUN),
    "generate --workdir=config.py --prompt=x": ("--workdir='config.py'", *NO_RUN),
    "generate --hf=org/name --prompt=x": ("'org/name' has no config.json", "downloads none"),
    "generate --hf=run --prompt=x --step=3": ("--step=3 is of a run's checkpoints", "leave it out"),
    "generate --workdir=run --prompt=x --step=3": NO_STEP,
    "generate --workdir=run --prompt=x --temperature=-1": ("temperature=-1.0", "0 or more"),
    "generate --workdir=run --prompt=x --temperature=nan": ("temperature=nan", "0 or more"),
    "generate --workdir=run --prompt=x --temperature=warm": ("--temperature=warm", NUMBER),
    "generate --workdir=run --prompt=x --top_k=-1": ("top_k=-1", "0 for all"),
    "generate --workdir=run --prompt=x --top_k=1.5": ("--top_k=1.5", WHOLE),
    "generate --workdir=run --prompt=x --top_p=0": ("top_p=0.0", "above 0 and up to 1"),
    "generate --workdir=run --prompt=x --seed=-1": ("seed=-1", "between 0 and 4294967295"),
    "generate --workdir=run --prompt=x --max_tokens=0": ("--max_tokens=0", "positive integer"),
    "generate --workdir=run --prompt=x --max_tokens=lots": ("--max_tokens=lots", WHOLE),
    "generate --workdir=run --prompt=x --max_tokens=99999999999": ("99999999999", "or less"),
    "generate --workdir=run --prompt=x --dtype=float64": (
        "--dtype=float64",
        "bfloat16|float16|float32",
    ),
    "generate --workdir=run --prompt=x --tokenizer=gpt2": ("--tokenizer='gpt2'", "give 'bytes'"),
    "generate --workdir=run": ("there is no prompt: write --prompt=...",),
    "generate --workdir=run --prompt=": ("prompt 1 holds no token", "write something"),
    "generate --workdir=run x": ("'x' is no flag", "--key=value"),
    "generate --workdir=run --prompt --temperature=0": ("--prompt has no value", "--prompt=..."),
    "generate --workdir=run --prmpt=x": ("'prmpt'", "Did you mean: prompt"),
    "generate --workdir=run --serve=0": ("--serve=0", "[1, 65535]"),
    "generate --workdir=run --serve=99999": ("--serve=99999", "[1, 65535]"),
    "generate --workdir=run --serve=http": ("--serve=http", WHOLE),
    "generate --workdir=run --serve=PORT": ("in use", "choose another port"),
}
EVALUATE = {
    "evaluate --workdir=run": ("--data is missing", "see --help"),
    "evaluate --data=text": ONE_OF,
    "evaluate --workdir=nowhere --data=text": ("--workdir='nowhere'", *NO_RUN),
    "evaluate --workdir=run --data=nowhere": ("--data='nowhere' finds no file",),
    "evaluate --workdir=run --data=a.json": ("--data='a.json'", "set --format to json"),
    "evaluate --workdir=run --data=a.json --format=json": ("no field 'text'", "set --text_field"),
    "evaluate --workdir=run --data=text --by=line": ("--by=line", "file|folder"),
    "evaluate --workdir=run --data=text --length=1": ("--length=1", ">= 2"),
    "evaluate --workdir=run --data=text --format=pdf": ("--format=pdf", "text|jsonl"),
    "evaluate --workdir=run --data=text --output=nowhere/x.json": (
        "--output=nowhere/x.json cannot be written",
        "name another file",
    ),
    "evaluate --workdir=run --data=text --output=text": ("--output=text", "name another file"),
    "evaluate --workdir=run --data=text --step=3": NO_STEP,
    "evaluate --workdir=run --data=high": ("--data holds token 300; the model has 257",),
}
COMPILE = {
    "compile_step": ("--config is missing",),
    "compile_step config.py": ("--config is missing",),
    "compile_step --config=config.py --target=b200": ("target='b200'", "h100, h200"),
    "compile_step --config=config.py --gpus=many": ("--gpus=many", WHOLE),
    "compile_step --config=config.py --hosts=0": ("--hosts=0", "positive integer"),
    "compile_step --config=config.py --gpus=3": ("config.batch_size=8", "a multiple of 3"),
    "compile_step --config=config.py --gpus=8 --config.mesh.fsdp=4": ("config.mesh (fsdp=4)",),
    "compile_step --config=config.py --dump=nowhere/x": ("--dump=nowhere/x", "another file"),
    "compile_step --config=config.py --workdir=made": ("flag 'workdir'",),
    "explain_pipeline --stages=1": ("--stages=1", ">= 2"),
    "explain_pipeline --stages=four": ("--stages=four", WHOLE),
    "explain_pipeline --stages=8 --microbatches=4": ("--microbatches=4 are fewer", "raise them"),
    "explain_pipeline --schedule=1f1b": ("--schedule=1f1b", "one_f_one_b"),
    "explain_pipeline --output=nowhere/x.png": ("--output=nowhere/x.png", "another file"),
}
MEASURE = {
    "report": ("name at least one metrics.jsonl",),
    "report nowhere": ("nowhere: No such file", "name the metrics.jsonl of a run"),
    "report run": ("run: Is a directory", "name the metrics.jsonl of a run"),
    "report config.py": ("config.py is no metrics.jsonl of a run",),
    "report run/metrics.jsonl": ("run/metrics.jsonl has 4 steps", "lower --skip"),
    "report run/metrics.jsonl --skip=-1": ("--skip=-1", "non-negative integer"),
    "report run/metrics.jsonl --skip=few": ("--skip=few", WHOLE),
    "anatomy": ("name at least one folder",),
    "anatomy text": ("text holds no *.xplane.pb",),
    "anatomy config.py": ("config.py is not a profile",),
    "anatomy text --device=gpu": ("--device=gpu", WHOLE),
    "anatomy text --top=-1": ("--top=-1", "non-negative integer"),
    "anatomy text --png=nowhere/x.png": ("--png=nowhere/x.png", "another file"),
    "bench_step --config=config.py --steps=0": ("--steps=0", "positive integer"),
    "bench_peers": ("name a config: --config=FILE",),
    "bench_pipeline": ("name a config: --config=FILE",),
    "bench_generate": ("name a config: --config=FILE",),
    "record_kernels": ("name a config: --config=FILE",),
    "try_repeats": ("name a config: --config=FILE",),
    "try_repeats --config=config.py --times=1": ("--times=1", ">= 2"),
    "bench_variants --config=config.py": ("name the variants: --variant=",),
    "bench_context --cases=none": ("--cases=none is not one of",),
    "bench_kernel nothing": ("name one kernel of adamw8bit, attention",),
    "bench_data --prefetch=few": ("--prefetch=few", WHOLE),
}
DOCTOR = {
    "doctor --workdir=config.py": ("--workdir=config.py cannot be written to", "another folder"),
    "doctor --workdir=": ("--workdir='' names no folder", "--workdir=runs/x"),
    "doctor --json=nowhere/x.json": ("--json=nowhere/x.json cannot be written", "another file"),
    "doctor --gib=0": ("--gib=0", ">= 0.001"),
    "doctor --gib=big": ("--gib=big", NUMBER),
    "doctor --patience=0": ("--patience=0", ">= 1"),
    "doctor --quick=maybe": ("--quick=maybe", "write true or false"),
    "doctor word": ("'word' is no flag",),
}
# These are found on the devices that are compiled for.
NEED_DEVICES = {
    "compile_step --config=config.py --gpus=3",
    "compile_step --config=config.py --gpus=8 --config.mesh.fsdp=4",
}
LINES = PREPARE | CONVERT | GENERATE | EVALUATE | COMPILE | MEASURE | DOCTOR
TABLES = (LINES,)


@pytest.fixture(scope="module", autouse=True)
def files(folder, hf):
    write_store(folder / "store")
    write_store(folder / "high", bad_id=300)
    (folder / "a.json").write_text('[{"body": "a"}]')


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_in_a_scripts_flags_is_told_and_makes_nothing(asked, folder, port, line):
    if line in NEED_DEVICES and (reason := ahead.missing()):
        pytest.skip(reason)
    before = content(folder / "run")
    answer = asked(line.replace("PORT", str(port)))
    assert_mistake(answer, *LINES[line], touched_devices=answer.touched_devices)
    assert not [path for path in folder.iterdir() if path.name.startswith("made")]
    assert content(folder / "run") == before
