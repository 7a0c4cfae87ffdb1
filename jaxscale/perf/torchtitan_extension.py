"""Runs inside torchtitan 0.2.2, which imports it by --experimental.custom_import: its Llama 3.

Two of torchtitan's settings have no effect where the comparison needs them:

- `training.mixed_precision_param`, where a stage of a pipeline, or a part of a model that tensor
  parallelism splits, is on one GPU. Mixed precision is then nobody's: FSDP casts, and torchtitan
  applies it to two GPUs and more only. All would be float32, products and messages too. Here the
  model is sharded by torchtitan's own function over a group of one, where PyTorch casts and
  communicates nothing (its fast path for world size 1).
- `parallelism.context_parallel_rotate_method`, which only validation reads.

And its models can have fewer layers: `8B_16layers` is its 8B with 16 of them, for GPUs that do not
hold all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor.experimental._attention import set_rotate_method
from torchtitan.config import TORCH_DTYPE_MAP  # type: ignore[import-not-found]
from torchtitan.models.llama3.infra.parallelize import (  # type: ignore[import-not-found]
    apply_fsdp,
    parallelize_llama,
)
from torchtitan.protocols.train_spec import (  # type: ignore[import-not-found]
    get_train_spec,
    register_train_spec,
)


def parallelize(model: Any, *of_the_run: Any) -> Any:
    """torchtitan's own, and what it leaves out; called with its ParallelDims and its JobConfig."""
    parallel_dims, job_config = of_the_run
    parallelism, training = job_config.parallelism, job_config.training
    if parallel_dims.cp_enabled:
        set_rotate_method(parallelism.context_parallel_rotate_method)
    model = parallelize_llama(model, parallel_dims, job_config)
    is_split = parallel_dims.pp_enabled or parallel_dims.tp_enabled
    if is_split and not parallel_dims.fsdp_enabled:
        apply_fsdp(
            model,
            # Public access is refused to a mesh of one.
            parallel_dims._meshes["fsdp"],
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            pp_enabled=True,  # casts once, not again for the backward pass
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        )
    return model


def with_fewer_layers(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """These and each with any smaller number of layers."""
    fewer = {
        f"{name}_{num_layers}layers": dataclasses.replace(args, n_layers=num_layers)
        for name, args in model_args.items()
        for num_layers in range(1, args.n_layers)
    }
    return {**model_args, **fewer}


# A specification of one's own comes before torchtitan's of the same name.
specification = get_train_spec("llama3")
specification = dataclasses.replace(
    specification,
    parallelize_fn=parallelize,
    model_args=with_fewer_layers(specification.model_args),
)
register_train_spec("llama3", specification)
