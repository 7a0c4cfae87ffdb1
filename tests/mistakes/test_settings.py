"""Settings of a run: their names, types and ranges, and layouts that do not divide."""

import pytest

from tests.mistakes.said import assert_mistake

WHOLE, NUMBER, BOOL = "write a whole number", "write a number", "write true or false"

# Words behind --config=config.py -> what the message says.
NAMES = {
    "--config.lr=1e-3": ("config.lr is not a setting", "config has model, optim, schedule"),
    "--config.epochs=3": ("config.epochs is not a setting", "config has"),
    "--config.optim.lr=1e-3": ("config.optim.lr is not a setting", "config.optim has b1, b2"),
    "--config.schedule.warmup=10": ("did you mean config.schedule.warmup_steps?",),
    "--config.checkpoints.every=5": ("did you mean config.checkpoint?",),
    "--config.log.wandb=x": ("config.log.wandb is not a setting", "wandb_project"),
    "--config.mesh.tp=2": ("config.mesh.tp is not a setting", "tensor"),
    "--config.mesh.pipeline=2": ("config.mesh.pipeline is not a setting", "stage"),
    "--config.optim=adafactor": ("--config.optim=adafactor", "in the config file"),
    "--config.schedule=cosine": ("--config.schedule=cosine", "in the config file"),
    "--config.model=llama": ("config.model='llama'", "write hf:DIR"),
    "--config.model=hf:": ("config.model='hf:'", "write hf:DIR"),
    "--config.init_from=run": ("config.init_from='run'", "write hf:DIR"),
    "--config.frozen --config.steps=3": ("--config.frozen has no value", "--config.frozen=..."),
    "--config.steps --config.seed=3": ("--config.steps has no value", "in front of --config.seed"),
    "--config.steps=3 extra": ("'extra' is no flag", "--key=value"),
    "--config.model.num_layers=2 --config.model=hf:x": ("config.model='hf:x'", "config.json"),
}
TYPES = {
    "--config.steps=1e3": ("--config.steps=1e3", WHOLE),
    "--config.steps=1,000": ("--config.steps=1,000", WHOLE),
    "--config.steps=": ("--config.steps=", WHOLE),
    "--config.seq_len=8k": ("--config.seq_len=8k", WHOLE),
    "--config.seed=1.5": ("--config.seed=1.5", WHOLE),
    "--config.mesh.fsdp=all": ("--config.mesh.fsdp=all", WHOLE),
    "--config.mesh.zero=three": ("--config.mesh.zero=three", WHOLE),
    "--config.schedule.warmup_steps=0.1": ("--config.schedule.warmup_steps=0.1", WHOLE),
    "--config.integrity.replay_every=0.5": ("--config.integrity.replay_every=0.5", WHOLE),
    "--config.schedule.peak=fast": ("--config.schedule.peak=fast", NUMBER),
    "--config.z_loss=small": ("--config.z_loss=small", NUMBER),
    "--config.model.rope_theta=big": ("--config.model.rope_theta=big", NUMBER),
    "--config.sample.temperature=hot": ("--config.sample.temperature=hot", NUMBER),
    "--config.data.eval_fraction=10%": ("--config.data.eval_fraction=10%", NUMBER),
    "--config.watchdog.pause_seconds=never": ("--config.watchdog.pause_seconds=never", NUMBER),
    "--config.checkpoint.every_minutes=soon": ("--config.checkpoint.every_minutes=soon", NUMBER),
    "--config.deterministic=yes": ("--config.deterministic=yes", BOOL),
    "--config.checkpoint.enabled=2": ("--config.checkpoint.enabled=2", BOOL),
    "--config.model.tie_embeddings=maybe": ("--config.model.tie_embeddings=maybe", BOOL),
    "--config.log.tensorboard=1.5": ("--config.log.tensorboard=1.5", BOOL),
    "--config.pipeline.lean=maybe": ("--config.pipeline.lean=maybe", BOOL),
    "--config.mesh.reshard_after_forward=0.5": ("reshard_after_forward=0.5", BOOL),
}
CHOICES = {
    "--config.remat=everything": ("--config.remat=everything", "auto|full|attention"),
    "--config.attention=flashattention": ("--config.attention=flashattention", "flash|cudnn|xla"),
    "--config.norm=layer": ("--config.norm=layer", "auto|xla|triton"),
    "--config.dtype=bf16": ("--config.dtype=bf16", "bfloat16|float16|float32"),
    "--config.mesh.reduce_dtype=fp8": ("--config.mesh.reduce_dtype=fp8", "bfloat16|float16"),
    "--config.mesh.axis_types=implicit": ("--config.mesh.axis_types=implicit", "explicit|auto"),
    "--config.pipeline.schedule=1f1b": ("--config.pipeline.schedule=1f1b", "one_f_one_b"),
    "--config.context.exchange=ulysses": ("--config.context.exchange=ulysses", "all_to_all"),
    "--config.context.balance=zigzag": ("--config.context.balance=zigzag", "head_tail|document"),
    "--config.data.format=txt": ("--config.data.format=txt", "text|jsonl"),
    "--config.data.on_corruption=ignore": ("--config.data.on_corruption=ignore", "stop|skip"),
    "--config.xla_options=": ("config.xla_options=''", "write name=value"),
    "--config.xla_options=optimization_level": ("'optimization_level'", "write name=value"),
}
RANGES = {
    "--config.steps=-5": ("config.steps=-5", "1 or more"),
    "--config.batch_size=0": ("config.batch_size=0", "1 or more"),
    "--config.seq_len=-1": ("config.seq_len=-1", "1 or more"),
    "--config.grad_accumulation=0": ("config.grad_accumulation=0", "1 or more"),
    "--config.seed=-1": ("config.seed=-1", "0 or more"),
    "--config.z_loss=inf": ("config.z_loss=inf", "or less"),
    "--config.optim.b1=1.5": ("config.optim.b1=1.5", "below 1"),
    "--config.schedule.peak=-1": ("config.schedule.peak=-1.0", "above 0"),
    "--config.schedule.peak=1e31": ("config.schedule.peak=1e+31", "1e+30 or less"),
    "--config.schedule.warmup_steps=-1": ("config.schedule.warmup_steps=-1", "0 or more"),
    "--config.schedule.final=2": ("config.schedule.final=2.0", "1 or less"),
    "--config.model.num_layers=0": ("config.model.num_layers=0", "1 or more"),
    "--config.model.vocab_size=0": ("config.model.vocab_size=0", "1 or more"),
    "--config.model.num_layers=3000000000": ("config.model.num_layers=3000000000", "or less"),
    "--config.model.window=0": ("config.model.window=0", "1 or more"),
    "--config.model.norm_eps=2": ("config.model.norm_eps=2.0", "below 1"),
    "--config.scan_unroll=0": ("config.scan_unroll=0", "1 or more"),
    "--config.leaner_layers=-1": ("config.leaner_layers=-1", "0 or more"),
    "--config.mesh.fsdp=-2": ("config.mesh.fsdp=-2", "-1 for the rest"),
    "--config.mesh.fsdp=1000000000000": ("config.mesh.fsdp=1000000000000", "-1 for the rest"),
    "--config.mesh.zero=0": ("config.mesh.zero=0", "1 or more and to 3 or less"),
    "--config.pipeline.chunks=1": ("config.pipeline.chunks=1", "2 or more and to 64 or less"),
    "--config.sample.tokens=-1": ("config.sample.tokens=-1", "0 or more"),
    "--config.sample.tokens=9 --config.sample.prompt=": ("sample.prompt=''", "sample.tokens=0"),
    "--config.sample.temperature=-1": ("config.sample.temperature=-1.0", "0 or more"),
    "--config.evaluation.every=-1": ("config.evaluation.every=-1", "0 or more"),
    "--config.evaluation.batches=0": ("config.evaluation.batches=0", "1 or more"),
    "--config.checkpoint.every=-1": ("config.checkpoint.every=-1", "0 or more"),
    "--config.checkpoint.keep_last=0": ("config.checkpoint.keep_last=0", "1 or more"),
    "--config.checkpoint.keep_every=-1": ("config.checkpoint.keep_every=-1", "0 or more"),
    "--config.checkpoint.every_minutes=-1": ("config.checkpoint.every_minutes=-1.0", "0 or more"),
    "--config.bad_steps.stop_after=0": ("config.bad_steps.stop_after=0", "1 or more"),
    "--config.bad_steps.spike=-1": ("config.bad_steps.spike=-1.0", "0 or more"),
    "--config.bad_steps.window=2": ("config.bad_steps.window=2", "8 or more"),
    "--config.bad_steps.roll_back=1 --config.checkpoint.enabled=False": (
        "config.bad_steps.roll_back=1",
        "set it to 0",
    ),
    "--config.loss_scale.growth_every=0": ("config.loss_scale.growth_every=0", "1 or more"),
    "--config.loss_scale.start=0.5": ("config.loss_scale.start=0.5", "1 or more"),
    "--config.loss_scale.start=1024": ("config.loss_scale.start=1024.0", "config.dtype='float16'"),
    "--config.dtype=float16 --config.loss_scale.start=1000": ("start=1000.0", "set it to 512.0"),
    "--config.dtype=float16 --config.loss_scale.most=1024": ("start=65536.0", "1024.0 or less"),
    "--config.dtype=float16 --config.precision.recipe=fp8_rowwise": (
        "config.precision.recipe='fp8_rowwise'",
        "set config.dtype='bfloat16'",
    ),
    "--config.dtype=bfloat16 --config.mesh.reduce_dtype=float16": (
        "config.mesh.reduce_dtype='float16'",
        "set it to 'bfloat16'",
    ),
    "--config.watchdog.step_seconds=-1": ("config.watchdog.step_seconds=-1.0", "0 or more"),
    "--config.integrity.replicas_every=-1": ("config.integrity.replicas_every=-1", "0 or more"),
    "--config.profile.start=-1": ("config.profile.start=-1", "0 or more"),
    "--config.profile.steps=10": ("config.profile.steps=10", "config.steps=4", "lower one"),
    "--config.profile.start=4 --config.profile.steps=1": ("config.profile.start=4", "lower one"),
    "--config.data.prefetch=0": ("config.data.prefetch=0", "1 or more"),
    "--config.data.threads=0": ("config.data.threads=0", "1 or more"),
    "--config.data.max_documents_per_row=-1": ("config.data.max_documents_per_row=-1", "0 or more"),
    "--config.data.eval_fraction=0": ("config.data.eval_fraction=0.0", "above 0 and below 1"),
}
STAGES = "--config.mesh.stage=2 --config.grad_accumulation=2 --config.batch_size=16"
SIZES = {
    "--config.model.num_kv_heads=3": ("num_heads=4 must be a multiple", "num_kv_heads=3"),
    "--config.model.head_size=7": ("config.model.head_size=7 must be even",),
    "--config.model.model_dim=30": ("config.model.model_dim=30 must be a multiple", "head_size"),
    "--config.batch_size=4 --config.grad_accumulation=8": (
        "config.batch_size=4",
        "make it a multiple of config.grad_accumulation=8",
    ),
    "--config.mesh.fsdp=-1 --config.mesh.tensor=-1": ("both -1", "only one axis"),
    "--config.mesh.stage=2": ("config.grad_accumulation=1", "set it to 2 or more"),
    f"{STAGES} --config.remat=none": ("config.remat='none'", "set it to 'gemms'"),
    f"{STAGES} --config.mesh.axis_types=auto": ("config.mesh.axis_types='auto'", "need 'explicit'"),
    "--config.mesh.context=2 --config.context.exchange=all_gather --config.model.window=4": (
        "config.model.window=4",
        "set config.context.exchange='all_to_all'",
    ),
    "--config.model.num_layers=4 --config.leaner_layers=2": (
        "config.remat='gemms'",
        "needs 'attention' or 'attention_mlp' or 'gemms_lean'",
    ),
    "--config.model.num_layers=4 --config.leaner_layers=2 --config.remat=attention": (
        "config.scan_unroll=1",
        "needs 4; set it to that",
    ),
    "--config.model.num_layers=6 --config.scan_unroll=4": ("scan_unroll=4", "divisor of the 6"),
}
# What only the devices tell, of which there are 8.
ON_DEVICES = {
    "--config.mesh.fsdp=16": ("config.mesh (fsdp=16) needs 16 devices and 8 are here",),
    "--config.mesh.fsdp=4": ("config.mesh (fsdp=4) needs 4 devices", "set one axis to -1"),
    "--config.mesh.data=5 --config.mesh.fsdp=1": ("config.mesh (data=5)", "set one axis to -1"),
    "--config.mesh.context=3": ("context=3) needs a multiple of 3 devices", "product is 8"),
    "--config.mesh.tensor=16": ("tensor=16) needs a multiple of 16 devices", "product is 8"),
    "--config.mesh.data=2 --config.mesh.fsdp=2 --config.mesh.tensor=4": ("needs 16 devices",),
    "--config.mesh.tensor=-1 --config.mesh.fsdp=1": (
        "config.model.num_heads=4 cannot be split",
        "set config.mesh.tensor to a divisor of 4",
    ),
    "--config.mesh.tensor=4 --config.model.mlp_dim=66": (
        "config.model.mlp_dim=66 cannot be split",
        "set config.mesh.tensor to a divisor of 66",
    ),
    # One row of each two devices, which split its sequence.
    "--config.mesh.tensor=2 --config.batch_size=4 --config.seq_len=33": (
        "config.seq_len=33",
        "sequence_parallel=False",
    ),
    "--config.mesh.context=2 --config.mesh.tensor=2 --config.batch_size=2 --config.seq_len=34": (
        "config.seq_len=34",
        "config.mesh.context=2 * config.mesh.tensor=2",
    ),
    "--config.mesh.context=2 --config.seq_len=31": (
        "config.seq_len=31",
        "set config.mesh.context to a divisor",
    ),
    "--config.mesh.context=8 --config.context.exchange=ring --config.seq_len=40": (
        "config.seq_len=40",
        "make it a multiple",
    ),
    "--config.mesh.fsdp=8 --config.batch_size=4": ("config.batch_size=4", "a multiple of 8"),
    "--config.mesh.async_tensor=halves": (
        "config.batch_size=8",
        "set config.mesh.async_tensor='off', or set config.batch_size to a multiple of 16",
    ),
    "--config.mesh.async_tensor=ring --config.mesh.tensor=2 --config.mesh.fsdp=4"
    " --config.batch_size=6": ("config.batch_size=6", "a multiple of 4"),
    STAGES: ("config.mesh.stage=2 is more than the 1 layers", "set it to 1 or less"),
    f"{STAGES} --config.model.num_layers=6 --config.mesh.async_tensor=auto"
    " --config.mesh.tensor=2": (
        "config.mesh.stage=2",
        "set config.mesh.async_tensor='off'",
    ),
    f"{STAGES} --config.model.num_layers=6 --config.pipeline.schedule=interleaved"
    " --config.pipeline.chunks=4": ("config.pipeline.chunks=4", "set it to 3 or less"),
    "--config.attention=flash": ("config.attention='flash' cannot run", "'auto'"),
    "--config.attention=cudnn": ("config.attention='cudnn' cannot run", "'auto'"),
    "--config.norm=triton": ("config.norm='triton' cannot run: it needs", "config.norm='auto'"),
    "--config.frozen=": ("config.frozen=('',) leaves no parameter", "name fewer"),
    "--config.xla_options=optimization_level=O9": ("'optimization_level=O9'", "O0, O1, O2, O3"),
}

# A whole command line -> what the message says.
COMMANDS = {
    "train": ("--config is missing",),
    "train --config=config.py": ("--workdir is missing; see --help",),
    "train --workdir=x": ("--config is missing; see --help",),
    "train --config=config.py --workdir": ("workdir", "Missing value"),
    "train --config=text --workdir=x": ("--config=text", "it is a folder; name a file"),
    "train --config=run --workdir=x": ("--config=run", "such as the config.json of a run"),
    "train --config= --workdir=x": ("--config=: no such file", "configs/"),
    "train --config=config --workdir=x": ("--config=config: no such file", "configs/"),
    "train --config=text/0.txt --workdir=x": ("SyntaxError", "text/0.txt, line 1"),
    "train --config=run/metrics.jsonl --workdir=x": ("has no get_config(arg)",),
    "train --config.steps=3 --config=config.py --workdir=x": (
        "--config.steps=3 stands in front of --config=FILE",
        "write it behind",
    ),
    "train --config=config.py --workdir=/dev/null/x": ("--workdir=/dev/null/x", "another folder"),
    "train --config=config.py --workdir=config.py/x": ("--workdir=config.py/x", "another folder"),
    "train --config=config.py --workdir=/proc/x": ("--workdir=/proc/x", "choose another folder"),
    "train --config=config.py --workdir=config.py": ("--workdir=config.py", "another folder"),
}
BEFORE_DEVICES = NAMES | TYPES | CHOICES | RANGES | SIZES
TABLES = (BEFORE_DEVICES, ON_DEVICES, COMMANDS)


@pytest.mark.parametrize("settings", BEFORE_DEVICES)
def test_a_setting_that_cannot_be_is_told_before_anything_is_made(asked, folder, settings):
    answer = asked(f"train --config=config.py --workdir=unmade {settings}")
    assert_mistake(answer, *BEFORE_DEVICES[settings])
    assert not (folder / "unmade").exists()


@pytest.mark.parametrize("settings", ON_DEVICES)
def test_a_layout_that_the_devices_cannot_have_is_told_before_anything_is_written(
    asked, folder, settings
):
    answer = asked(f"train --config=config.py --workdir=unwritten {settings}")
    assert_mistake(answer, *ON_DEVICES[settings], touched_devices=True)
    assert not [*folder.glob("unwritten/*")]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_that_cannot_be_is_told(asked, line):
    assert_mistake(asked(line), *COMMANDS[line])
