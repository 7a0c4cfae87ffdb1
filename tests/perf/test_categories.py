"""What a GPU launches counts once, in its row."""

import pytest

from jaxscale.perf.categories import Launch, classify, collective_kind
from tests.perf.traces import MODULE

# By row: name, HLO operation and op name as XLA gives them for H100 (jax 0.11.2).
KINDS = {
    "gemm": [
        (
            "nvjet_sm90_tst_192x192_64x4_1x2",
            "custom-call.17",
            "jit(f)/jvp()/BSF,DF->BSD/dot_general",
        ),
        ("nvjet_tst_128x256", "dynamic_slice_fusion.3", ""),
        ("gemm_fusion_dot_12_0", "gemm_fusion_dot.12", ""),
        ("void cutlass::device_kernel<...>", "custom-call.4", ""),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "cublas-lt-matmul.9", ""),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "custom-call.1", ""),
    ],
    "attention": [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "custom-call.2", ""),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "", ""),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "", ""),
        ("Memset", "dot_product_attention_bwd.3", "jit(f)/shard_map/dot_product_attention_bwd"),
        ("loop_select_fusion_2", "loop_select_fusion.2", "jit(f)/jvp(attention)/select_n"),
    ],
    "elementwise": [
        ("loop_add_fusion_3", "loop_add_fusion.3", "jit(f)/transpose(jvp())/checkpoint/add_any"),
        ("wrapped_convert", "wrapped_convert", "jit(f)/jvp()/shard_map/convert_element_type"),
        ("input_concatenate_fusion_1", "input_concatenate_fusion.1", "jit(f)/jvp()/concatenate"),
        ("fusion_215", "fusion.215", "jit(f)/jvp()/convert_element_type"),
        ("loop_multiply_fusion", "loop_multiply_fusion", "jit(f)/lossy/my_loss/mul"),
    ],
    "copy": [
        (
            "loop_dynamic_update_slice_fusion_4",
            "loop_dynamic_update_slice_fusion.4",
            "jit(f)/dynamic_update_slice",
        ),
        ("loop_broadcast_fusion_8", "loop_broadcast_fusion.8", "broadcast.98"),
        ("wrapped_transpose", "wrapped_transpose", "jit(f)/transpose(jvp())/transpose"),
        ("MemcpyD2D", "copy.229", ""),
    ],
    "transfer": [
        ("MemcpyD2H", "", ""),
    ],
    "loss_gemm": [
        (
            "nvjet_tst_128x256",
            "custom-call.27",
            "jit(f)/transpose(jvp(loss))/while/body/dot_general",
        ),
        # XLA's annotations end a name at its first comma, here that of TD,DV->TV.
        (
            "nvjet_tst_128x256",
            "dynamic_slice_fusion.1",
            "jit(f)/jvp(loss)/shard_map/while/body/eval_jaxpr/TD",
        ),
    ],
    "loss": [
        ("input_reduce_fusion", "input_reduce_fusion", "loss/while/body/reduce_max"),
        ("loop_add_fusion", "loop_add_fusion", "jit(f)/(jvp(loss)/mul:transpose(jvp())/add)"),
    ],
    "optimizer": [
        ("nvjet_tst_128x256", "custom-call.5", "jit(f)/optimizer/dot_general"),
    ],
    "embedding": [
        (
            "input_scatter_fusion",
            "input_scatter_fusion",
            "jit(f)/transpose(jvp(embedding))/scatter-add",
        ),
    ],
    "communication": [
        ("ncclDevKernel_AllGather_RING_LL(Args<4096ul>)", "all-gather-start.5", "jit(f)/loss/x"),
        ("MemcpyD2D", "all_to_all.7.2", ""),
    ],
}


@pytest.mark.parametrize(
    ("row", "names"), [(row, names) for row, kinds in KINDS.items() for names in kinds]
)
def test_a_launch_counts_in_its_row(row, names):
    name, hlo_op, op_name = names
    assert classify(Launch(name, hlo_op, op_name, MODULE)) == row


@pytest.mark.parametrize(
    ("name", "hlo_op", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "", "all-gather"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "psum.66.2", "all-reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter.15.1", "reduce-scatter"),
        ("ncclDevKernel_SendRecv", "all_to_all.7.2", "all-to-all"),
        ("ncclDevKernel_SendRecv", "ragged-all-to-all-start", "ragged-all-to-all"),
        ("ncclDevKernel_SendRecv", "ppermute.2", "collective-permute"),
        ("ncclDevKernel_SendRecv", "", "send and receive"),
        ("ncclNew", "", "other"),
    ],
)
def test_a_collective_is_told_by_its_operation_or_else_its_name(name, hlo_op, kind):
    assert classify(Launch(name, hlo_op, "", MODULE)) == "communication"
    assert collective_kind(Launch(name, hlo_op, "", MODULE)) == kind
