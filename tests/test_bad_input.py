"""What a user gets wrong is told in a line that names key, value and fix, before it harms anything.

The exit code is 2.
"""

import json
import re
import shlex
import shutil
import struct
from pathlib import Path

import pytest

from jaxscale.command_line import folder_of
from jaxscale.train.workdir import only_run
from tests.mistakes.said import assert_mistake, content, cut, write_run, write_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with config.py and text/ (documents several rows long), where the commands run."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def command(forks, folder):
    """`command("--config.steps=abc", workdir="new") -> Answer` of scripts/train.py."""

    def command(*arguments, config="config.py", workdir="runs/new"):
        words = (f"--config={config}", f"--workdir={workdir}", *arguments)
        return forks.run("train", *words, folder=folder)

    return command


@pytest.fixture(scope="module")
def trained(command, folder):
    """The workdir of a finished run."""
    answer = command(workdir="runs/trained")
    assert answer.code == 0, answer.err
    return folder / "runs" / "trained"


# Arguments -> what the message says: key, value and fix.
BEFORE_DEVICES = {
    "--config.mesh.foo=1": ("config.mesh.foo is not a setting", "stage, data, fsdp"),
    "--config.mesh.fdsp=1": ("config.mesh.fdsp is not a setting", "did you mean config.mesh.fsdp?"),
    "--config.modle=1": ("config.modle is not a setting", "did you mean config.model?"),
    "--config.modle.num_layers 1": ("config.modle is not a setting", "did you mean config.model?"),
    "--noconfig.data.shufle": (
        "config.data.shufle is not a setting",
        "did you mean config.data.shuffle?",
    ),
    "--config.steps.foo=1": (
        "config.steps.foo is not a setting",
        "config.steps has no settings of its own",
    ),
    "--config.model.rope_scaling.factor=8": ("model.rope_scaling.factor", "rope_scaling=build"),
    "--config.steps=abc": ("--config.steps=abc", "write a whole number"),
    "--config.steps=2.5": ("--config.steps=2.5", "write a whole number"),
    "--config.steps=none": ("config.steps=None", "set it to a value of type int"),
    "--config.steps=0": ("config.steps=0", "set it to 1 or more"),
    "--config.z_loss=-1": ("config.z_loss=-1.0", "set it to 0 or more"),
    "--config.z_loss=nan": ("config.z_loss=nan", "set it to 0 or more"),
    "--config.dtype=float64": ("--config.dtype=float64", "bfloat16|float16|float32"),
    "--config.data.shuffle=maybe": ("--config.data.shuffle=maybe", "write true or false"),
    "--config.data.shuffle False": ("'False' is no flag", "write --config.data.shuffle=False"),
    "--config.data.shuffle ''": ("'' is no flag", "write --config.data.shuffle="),
    "elsewhere": ("'elsewhere' is no flag", "--key=value"),
    "--config.mesh=8": ("--config.mesh=8",),
    "--wrkdir=there": ("wrkdir", "Did you mean: workdir"),
    "--config.batch_size=9 --config.grad_accumulation=2": (
        "config.batch_size=9",
        "make it a multiple of config.grad_accumulation=2",
    ),
    "--config.scan_unroll=2": ("config.scan_unroll=2", "divisor of the 1 layers"),
    "--config.leaner_layers=1": ("config.leaner_layers=1", "would leave none for config.remat"),
    "--config.schedule.warmup_steps=4": ("config.schedule.warmup_steps=4", "config.steps=4"),
    "--config.schedule.peak=0": ("config.schedule.peak=0.0", "above 0"),
    "--config.optim.b2=1": ("config.optim.b2=1.0", "set it to 0 or more and below 1"),
    "--config.model.num_heads=3": ("config.model.num_heads=3", "config.model.num_kv_heads=4"),
    "--config.model.max_seq_len=16": (
        "config.seq_len=32",
        "lower it, or raise config.model.max_seq_len=16",
    ),
    "--config.mesh.fsdp=0": ("config.mesh.fsdp=0", "set it to 1 or more, or to -1 for the rest"),
    "--config.optim.eps=inf": ("config.optim.eps=inf", "set it above 0 and to 1 or less"),
    "--config.optim.eps=1e-300": ("config.optim.eps=1e-300", "it is 0 in float32"),
    "--config.optim.b2=0.99999999": ("config.optim.b2=0.99999999", "below 1"),
    "--config.optim.clip_norm=nan": ("config.optim.clip_norm=nan", "set it to 0 or more"),
    "--config.model.init_scale=0": ("config.model.init_scale=0.0", "set it above 0"),
    "--config.model.norm_eps=-1": ("config.model.norm_eps=-1.0", "set it above 0"),
    "--config.model.rope_theta=0": ("config.model.rope_theta=0.0", "set it to 1 or more"),
    "--config.model.head_size=-2": ("config.model.head_size=-2", "set it to 2 or more"),
    "--config.seed=12345678901234567890123": (
        "config.seed=12345678901234567890123",
        "to 4294967295 or less",
    ),
    "--config.sample.temperature=-inf": ("config.sample.temperature=-inf", "0 or more"),
    "--config.data.threads=100000": ("config.data.threads=100000", "1000 or less"),
    "--config.data.text_field=\udcff": ("config.data.text_field='\\udcff'", "UTF-8"),
    "--config.mesh.data=-1": ("config.mesh.data and config.mesh.fsdp are both -1", "only one"),
    "--config.mesh.expert=2": ("config.mesh.expert=2", "set config.mesh.expert=1"),
    "--config.mesh.context=2 --config.context.exchange=ring --config.model.window=4": (
        "config.model.window=4",
        "set config.context.exchange='all_to_all'",
    ),
    "--config.mesh.zero=4": ("config.mesh.zero=4", "set it to 1 or more and to 3 or less"),
    "--config.xla_options=gemm=1": (
        "config.xla_options='gemm=1'",
        "name=value",
        "begins with xla_",
    ),
    "--config.xla_options=xla_dump_to": ("config.xla_options='xla_dump_to'", "name=value"),
    "--config.data.path=nowhere": ("config.data.path='nowhere'", "finds no file"),
    "--config.data.tokenizer=nowhere": ("config.data.tokenizer='nowhere'", "tokenizer.json"),
    "--config.data.eval_fraction=1": (
        "config.data.eval_fraction=1.0",
        "set it above 0 and below 1",
    ),
    "--config.seq_len=4096": ("seq_len=4096", "lower seq_len, or add text"),
}


@pytest.mark.parametrize("arguments", BEFORE_DEVICES)
def test_a_mistake_is_told_before_devices_are_touched_and_changes_nothing(
    command, trained, arguments
):
    workdir = workdir_for(arguments, trained)
    before = content(workdir)
    answer = command(*shlex.split(arguments), workdir=workdir)
    assert_mistake(answer, *BEFORE_DEVICES[arguments])
    assert content(workdir) == before


def workdir_for(arguments, trained):
    """A new one for what a workdir cannot change."""
    owned = ("seq_len", "config.batch_size", "tokenizer")
    return trained.with_name("other") if any(key in arguments for key in owned) else trained


# What only the number of devices tells.
ON_DEVICES = {
    "--config.xla_options=xla_backend_optimization_level=high": (
        "config.xla_options",
        "'high' is not a valid int32 value",
    ),
    "--config.frozen=nowhere": (
        "config.frozen: no parameter has 'nowhere' in its path; there are",
        "layers.qkv",
    ),
    "--config.frozen=layers --config.frozen=norm --config.frozen=embed --config.frozen=head": (
        "config.frozen=('layers', 'norm', 'embed', 'head') leaves no parameter to train",
        "name fewer of them",
    ),
    "--config.mesh.fsdp=3": (
        "config.mesh (fsdp=3) needs 3 devices and 8 are here",
        "set one axis to -1",
    ),
    "--config.mesh.tensor=3": (
        "config.mesh (fsdp=-1, tensor=3) needs a multiple of 3 devices",
        "product is 8",
    ),
    "--config.mesh.tensor=8": (
        "config.model.num_heads=4",
        "tensor=8",
        "set config.mesh.tensor to a divisor of 4",
    ),
    "--config.batch_size=12": (
        "config.batch_size=12",
        "must be a multiple of data * fsdp * expert = 8",
    ),
    "--config.batch_size=8 --config.grad_accumulation=2": (
        "config.batch_size=8",
        "set config.batch_size to a multiple of 16",
    ),
    "--config.mesh.context=8 --config.context.exchange=all_to_all": (
        "config.model.num_heads=4",
        "context=8",
        "set config.mesh.context to a divisor of 4, or config.context.exchange='all_gather'",
    ),
    "--config.mesh.tensor=4 --config.batch_size=4 --config.seq_len=30": (
        "config.seq_len=30",
        "config.mesh.tensor=4",
        "sequence_parallel=False",
    ),
}


@pytest.mark.parametrize("arguments", ON_DEVICES)
def test_a_layout_that_does_not_fit_the_devices_is_told_and_changes_nothing(
    command, trained, arguments
):
    workdir = workdir_for(arguments, trained)
    before = content(workdir)
    assert_mistake(
        command(*shlex.split(arguments), workdir=workdir),
        *ON_DEVICES[arguments],
        touched_devices=True,
    )
    assert content(workdir) == before


def test_a_config_file_that_is_not_there_or_refuses_is_told(command, folder):
    assert_mistake(command(config="nowhere.py"), "--config=nowhere.py", "no such file")
    assert_mistake(
        command(config="config.py:big"),
        "--config=config.py:big",
        "big is not a variant of this file",
    )
    (folder / "none.py").write_text("def get_config(arg=''):\n    pass\n")
    assert_mistake(
        command(config="none.py"),
        "get_config() returned a NoneType",
        "return a jaxscale.config.Config",
    )


# A config file's text -> what is told of it.
BROKEN_CONFIGS = {
    "def get_config(arg=''):\n    return missing_name\n": ("NameError", "missing_name", "line 2"),
    "import nowhere\n": ("ModuleNotFoundError", "'nowhere'", "line 1"),
    "def get_config(:\n": ("SyntaxError", "invalid syntax", "line 1"),
    "def get_config(arg=''):\n    return Config()\nConfig = len\n": ("TypeError", "line 2"),
    "from jaxscale.models import llama\n\nllama.Config(layers=3)\n": ("'layers'", "line 3"),
    "open('nowhere.txt')\n": ("FileNotFoundError", "nowhere.txt", "line 1"),
    "def get_config(arg=''):\n    raise ValueError('not so')\n": (": not so (", "line 2"),
    "steps = 3\n": ("no get_config(arg)", "jaxscale.config.Config"),
    "def get_config(arg=''):\n    return {'steps': 3}\n": ("get_config() returned a dict",),
    "\0": ("null bytes",),
}


@pytest.mark.parametrize("text", BROKEN_CONFIGS)
def test_a_broken_config_file_is_told_with_its_line(command, folder, text):
    (folder / "broken.py").write_text(text)
    assert_mistake(command(config="broken.py"), "--config=broken.py", *BROKEN_CONFIGS[text])


# A config.json -> what is told of it.
BROKEN_JSON = {
    '{"steps": 3,\n "batch_size"}': ("cannot be read as JSON", "line 2 column"),
    "[1, 2]": ("config=[1, 2] is of type list", "write an object"),
    '{"steps": 3}': ("config: ", "missing", "'model'"),
    '{"steps": 3, "modle": {}}': ("config.modle is not a setting", "did you mean config.model?"),
}


@pytest.mark.parametrize("text", BROKEN_JSON)
def test_a_broken_config_json_is_told(command, folder, text):
    (folder / "broken.json").write_text(text)
    assert_mistake(command(config="broken.json"), "--config=broken.json", *BROKEN_JSON[text])


def test_the_config_json_of_a_run_is_a_config_file(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "again")
    answer = command(config="runs/again/config.json", workdir=workdir)
    assert answer.code == 0, answer.err
    assert "nothing to train: step 4 is done" in answer.out


def test_an_empty_workdir_is_refused(command, folder):
    before = sorted(folder.iterdir())
    assert_mistake(command(workdir=""), "--workdir=''", "such as --workdir=runs/x")
    assert sorted(folder.iterdir()) == before


def test_a_folder_below_the_home_folder_may_be_written_with_a_tilde(command, folder):
    home = Path.home()
    told = f"--config=~/nowhere-{folder.name}.py"
    assert_mistake(command(config=told.partition("=")[2]), told, "no such file")
    assert_mistake(command("--config.steps=0", workdir="~/new"), "config.steps=0")
    assert folder_of("workdir", "~/new") == str(home / "new")


def test_where_no_record_can_be_kept_a_run_still_trains(command, folder):
    workdir = folder / "runs" / "unkept"
    (workdir / "metrics.jsonl").mkdir(parents=True)
    (workdir / "tensorboard").write_text("a file")
    answer = command("--config.log.tensorboard", "--config.log.wandb_project=p", workdir=workdir)
    assert answer.code == 0, answer.err
    for what in ("no metrics.jsonl: ", "no TensorBoard files: ", "no Weights & Biases: "):
        assert answer.out.count(what) == 1, answer.out
    assert "done: step 4 of 4" in answer.out and "Traceback" not in answer.out + answer.err


def test_the_metrics_of_another_run_stay_beside(command, folder):
    workdir = folder / "runs" / "reused"
    workdir.mkdir(parents=True)
    (workdir / "metrics.jsonl").write_bytes(b"\x00\xff binary\n" * 3)
    answer = command(workdir=workdir)
    assert answer.code == 0, answer.err
    assert "they are in metrics.jsonl.old now" in answer.out
    assert (workdir / "metrics.jsonl.old").read_bytes() == b"\x00\xff binary\n" * 3
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record or "eval_loss" in record]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 4]


def test_settings_that_changed_are_told_and_the_old_ones_kept(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "changed")
    before = (workdir / "config.json").read_bytes()
    answer = command("--config.steps=0x6", "--config.optim.weight_decay=0", workdir=workdir)
    assert answer.code == 0, answer.err
    assert "going on from step 4 with other settings:" in answer.out
    assert "config.steps: saved 4, now 6" in answer.out
    assert "config.optim.weight_decay: saved 0.1, now 0.0" in answer.out
    assert "the learning rate of step 5 becomes" in answer.out
    assert (workdir / "config.step4.json").read_bytes() == before
    command_line = re.search(r"train on with: (.*)", answer.out)
    assert command_line is not None
    words = shlex.split(command_line[1])
    assert words[:2] == ["cd", str(folder)] and words[-1] == "--config.steps=12"
    assert "--config.optim.weight_decay=0" in words and "--config.steps=0x6" not in words


def test_a_workdir_of_another_run_is_refused_with_the_differing_keys(command, trained):
    before = content(trained)
    answer = command("--config.model.mlp_dim=96", "--config.seed=3", workdir=trained)
    assert_mistake(
        answer,
        "holds another run",
        "config.model.mlp_dim: saved 64, now 96",
        "config.seed: saved 0, now 3",
    )
    assert "num_layers" not in answer.err
    assert content(trained) == before


def test_a_workdir_that_cannot_be_written_is_refused(command, folder):
    (folder / "file").write_text("not a folder")
    assert_mistake(
        command(workdir="file"), "--workdir=file cannot be written to", "choose another folder"
    )
    assert (folder / "file").read_text() == "not a folder"
    (folder / "half").mkdir()
    (folder / "half" / "config.json").write_text('{"steps": ')
    assert_mistake(command(workdir="half"), "config.json is not a JSON object", "move it away")


# What stands where a workdir's config.json does -> what is told of it.
BROKEN_WORKDIRS = {
    '{"model": 3}': "is no config of a run: model is 3",
    '{"model": {}, "optim": [1], "data": {}}': "is no config of a run: optim is [1]",
    "[" * 100_000: "is not a JSON object",
    "null": "is not a JSON object",
    "a folder": "cannot be read (Is a directory)",
    "a link to nothing": "cannot be read (No such file or directory)",
}


@pytest.mark.parametrize("text", BROKEN_WORKDIRS, ids=lambda text: text[:40])
def test_a_broken_config_json_of_a_workdir_is_named(command, trained, tmp_path, text):
    workdir = shutil.copytree(trained, tmp_path / "run")
    path = workdir / "config.json"
    path.unlink()
    if text == "a folder":
        path.mkdir()
    elif text == "a link to nothing":
        path.symlink_to("nowhere")
    else:
        path.write_text(text)
    answer = command(workdir=workdir)
    assert_mistake(answer, f"{path} {BROKEN_WORKDIRS[text]}", "move it away")


def test_a_workdir_file_that_cannot_be_written_is_named(command, trained, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "run")
    (workdir / "config.json.tmp").mkdir()
    answer = command(workdir=workdir)
    assert_mistake(
        answer, f"{workdir}/config.json cannot be written: Is a directory", touched_devices=True
    )


def test_records_that_are_none_stop_nothing_and_are_kept(command, trained, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "run")
    lines = '{"step": null}\n{"step": [1]}\n[]\n{"step": 1e999}\nnonsense\n'
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write(lines)
    answer = command("--config.steps=5", workdir=workdir)
    assert answer.code == 0, answer.err
    assert lines in (workdir / "metrics.jsonl.old").read_text()
    assert "null" not in (workdir / "metrics.jsonl").read_text()


def test_checkpoints_deleted_under_a_workdir_are_told_and_its_records_kept(
    command, trained, tmp_path
):
    workdir = shutil.copytree(trained, tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_text()
    for again in (1, 2):
        shutil.rmtree(workdir / "checkpoints")
        answer = command(workdir=workdir)
        assert answer.code == 0, answer.err
        assert (
            "held records up to step 4, and there is no checkpoint to go on from: this run "
            "starts at step 0, and they are in metrics.jsonl.old now" in answer.out
        )
        kept = (workdir / "metrics.jsonl.old").read_text()
        assert kept.startswith(before) and kept.count('"eval_loss"') == 2 * again


def test_data_that_changed_under_a_run_is_refused(command, trained, folder):
    before = content(trained)
    (folder / "changed").mkdir()
    (folder / "changed" / "a.txt").write_text("Something else. " * 40)
    (folder / "changed" / "b.txt").write_text("And something more. " * 40)
    answer = command("--config.data.path=changed", workdir=trained)
    # The checkpoint that knows the data is read with Orbax, which asks for the devices.
    assert_mistake(
        answer,
        "changed is not the data this run began with",
        "num_tokens was",
        "restore config.data.path",
        touched_devices=True,
    )
    assert content(trained) == before


DAMAGES = {
    "a .bin cut short": (
        lambda data, index: cut(data, 70_000),
        ("has 70000 bytes", "truncated: copy it again"),
    ),
    "an .idx cut short": (
        lambda data, index: cut(index, 100),
        ("is truncated: 100 bytes", "write it again"),
    ),
    "an .idx of another store": (
        lambda data, index: data.write_bytes(data.read_bytes() + b"\0\0"),
        ("has 80002 bytes", "they belong to different stores"),
    ),
    "no .idx": (lambda data, index: index.unlink(), ("no such file", "copy both")),
    "an empty .bin": (lambda data, index: cut(data, 0), ("is empty", "copy the store again")),
    "an .idx that is no index": (
        lambda data, index: index.write_bytes(b"?" * 200),
        ("is not a Megatron index",),
    ),
    "offsets that do not follow each other": (
        lambda data, index: index.write_bytes(
            # The second of the 40 offsets, behind the header (34 bytes) and 40 lengths.
            index.read_bytes()[: 34 + 160 + 8]
            + struct.pack("<q", 5)
            + index.read_bytes()[34 + 160 + 16 :]
        ),
        ("sequence 1 begins at byte 5", "write the store again"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_told_before_devices_are_touched(command, tmp_path, damage):
    spoil, fragments = DAMAGES[damage]
    spoil(*write_store(tmp_path / "store"))
    assert_mistake(
        command(f"--config.data.path={tmp_path / 'store.bin'}", workdir=tmp_path / "run"),
        *fragments,
    )


def test_empty_data_is_told(command, folder, tmp_path):
    (folder / "empty").mkdir()
    assert_mistake(command("--config.data.path=empty"), "config.data.path='empty'", "finds no file")
    (folder / "empty" / "a.txt").write_text("")
    assert_mistake(
        command("--config.data.path=empty"),
        "none of the 1 documents holds text",
        "check config.data.path",
    )
    (folder / "empty" / "b.txt").write_bytes(b"caf\xe9")
    assert_mistake(
        command("--config.data.path=empty"), "b.txt is not UTF-8 at byte 3", "convert it"
    )


def test_ids_beyond_the_vocabulary_are_told(command, tmp_path):
    answer = command("--config.model.vocab_size=100", workdir=tmp_path / "text")
    assert_mistake(
        answer,
        "config.data.tokenizer='bytes' has 257 ids but vocab_size=100",
        "set config.model.vocab_size to 257",
    )
    write_store(tmp_path / "first", bad_id=300, at=0)
    answer = command(f"--config.data.path={tmp_path / 'first'}", workdir=tmp_path / "store")
    assert_mistake(answer, "document 0 holds id 300 at position 0", "set config.model.vocab_size")


def test_an_id_beyond_the_vocabulary_that_turns_up_later_is_told_too(command, tmp_path):
    # 28 of the 40 documents are for training; before the start rows 444 tokens apart are looked at.
    write_store(tmp_path / "later", bad_id=300, at=200)
    answer = command(
        f"--config.data.path={tmp_path / 'later'}",
        "--config.data.shuffle=False",
        workdir=tmp_path / "run",
    )
    assert_mistake(
        answer,
        "document 0 holds id 300 at position 200",
        "set config.model.vocab_size",
        touched_devices=True,
    )


def test_another_runs_checkpoint_is_refused_also_without_its_config_json(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "anonymous")
    (workdir / "config.json").unlink()
    answer = command("--config.seed=7", workdir=workdir)
    assert_mistake(answer, "holds another run", "config.seed: saved 0, now 7", touched_devices=True)
    assert not (workdir / "config.json").exists()


def test_a_workdir_in_use_is_refused(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "busy")
    with only_run(workdir):
        before = content(workdir)
        assert_mistake(
            command(workdir=workdir), "is in use by another run", "choose another folder"
        )
        assert content(workdir) == before


def test_checkpoints_that_would_not_be_kept_up_are_told(command, trained):
    answer = command("--config.checkpoint.enabled=False", workdir=trained)
    assert_mistake(
        answer,
        "config.checkpoint.enabled=False",
        "holds step 4",
        "choose another",
        touched_devices=True,
    )


def test_clipping_can_be_switched_off_in_a_run(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "unclipped")
    answer = command("--config.optim.clip_norm=0.0", "--config.steps=6", workdir=workdir)
    assert answer.code == 0, answer.err


def test_a_compiler_option_that_this_jaxlib_has_not_is_named_and_ignored(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "option")
    options = (
        "--config.xla_options=xla_gpu_graph_level=0",
        "--config.xla_options=xla_backend_optimization_level=0",
    )
    answer = command(*options, "--config.steps=6", workdir=workdir)
    assert answer.code == 0, answer.err
    assert (
        "compiler option xla_gpu_graph_level: jaxlib" in answer.out
        and "it is ignored" in answer.out
    )
    assert (
        "compiler option: xla_backend_optimization_level=0, from config.xla_options" in answer.out
    )


def test_a_half_written_checkpoint_is_passed_over_for_the_last_whole_one(command, trained, folder):
    workdir = shutil.copytree(trained, folder / "runs" / "damaged")
    damaged = next((workdir / "checkpoints" / "4" / "state").rglob("d/*"))
    cut(damaged, damaged.stat().st_size // 2)
    answer = command(workdir=workdir)
    assert answer.code == 0, answer.err
    assert "checkpoint step 4" in answer.out and "is damaged and not used" in answer.out
    assert "continuing from the checkpoint of step 2" in answer.out
    assert (workdir / "checkpoints" / "4.corrupt").is_dir()
    # Without the last file of a save it is no checkpoint at all; with none left nothing is made up.
    for step in ("2", "4"):
        (workdir / "checkpoints" / step / "checksums.json").unlink()
    answer = command(workdir=workdir)
    assert answer.code == 1 and "Traceback" not in answer.err
    assert (
        "no sound checkpoint to restore" in answer.err and "move these folders away" in answer.err
    )


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(command, folder):
    workdir = folder / "runs" / "diverged"
    settings = ("--config.schedule.peak=1e30", "--config.checkpoint.every=2")
    answer = command(*settings, "--config.bad_steps.stop_after=1", workdir=workdir)
    assert answer.code == 1
    assert "Traceback" not in answer.err
    assert "step 2: grad_norm is nan" in answer.err and "lower config.schedule.peak" in answer.err
    assert "nothing is saved" in answer.err
    assert not (workdir / "checkpoints").exists()
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[2]["non_finite"]["grad_norm"] == "nan"
    # It saved nothing, so the workdir is free for another try.
    answer = command(
        "--config.batch_size=16",
        "--config.steps=2",
        "--config.schedule.warmup_steps=1",
        workdir=workdir,
    )
    assert answer.code == 0, answer.err
