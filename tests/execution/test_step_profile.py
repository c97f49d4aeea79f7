"""Where a step's time goes: kernels by kind, collectives that others hide, and real trials."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from autotune.execution.step_profile import kind_of, of_cpu, of_gpu
from autotune.values.budget import ProfileTask


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "matrix products"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::convolution_backward", "matrix products"),
        ("void flash::flash_fwd_kernel<flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, float, 10>", "attention"),
        ("aten::_log_softmax", "element-wise"),
        ("aten::convert_element_type", "element-wise"),
        ("triton_poi_fused_add_mul_3", "element-wise"),
        ("Memcpy DtoD (Device -> Device)", "element-wise"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "other devices"),
    ],
)
def test_a_kernel_is_told_by_its_name(name, kind):
    assert kind_of(name) == kind


def kernel(name: str, start: float, end: float, *, is_range: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, is_user_annotation=is_range, time_range=span)


def test_of_a_gpu_kernels_within_the_optimizer_count_as_it_and_collectives_where_nothing_hides_them():
    found = of_gpu(
        [
            kernel("gemm", 0, 1e6),
            kernel("triton_poi_fused_add", 1e6, 2e6),
            kernel("ncclDevKernel_AllReduce", 1.5e6, 2.5e6),
            kernel("Optimizer.step#AdamW.step", 3e6, 4e6, is_range=True),
            kernel("multi_tensor_apply_kernel", 3.2e6, 3.9e6),
            SimpleNamespace(name="aten::mm", device_type=DeviceType.CPU),
        ]
    )
    expected = {"matrix products": 1.0, "element-wise": 1.0, "other devices": 0.5, "optimizer": 0.7}
    assert found == pytest.approx(expected)


def test_kernels_that_run_at_once_share_the_time_that_they_cover():
    assert of_gpu([kernel("gemm", 0, 1e6), kernel("add", 0, 1e6)]) == {"matrix products": 0.5, "element-wise": 0.5}
    assert of_gpu([]) == {}


def test_of_a_cpu_each_operator_counts_without_those_that_it_calls():
    def ran(name: str, seconds: float, parent: SimpleNamespace | None = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, self_cpu_time_total=seconds * 1e6, cpu_parent=parent)

    step = ran("Optimizer.step#AdamW.step", 0.5)
    linear = ran("aten::linear", 0.25)
    events = [step, ran("aten::mul_", 1.0, step), linear, ran("aten::addmm", 2.0, linear), ran("Engine", 9.0)]
    assert of_cpu(events) == {"optimizer": 1.5, "matrix products": 2.25}


def test_a_trial_tells_what_the_processor_did_in_a_step(bench):
    fields = {"global_batch_size": 8, "sequence_length": 64}
    found = bench.checked(ProfileTask(), workload=fields, config={"per_device_train_batch_size": 4})
    assert {"matrix products", "element-wise", "optimizer"} <= found.busy_s.keys()
    assert 0 < sum(found.busy_s.values()) < 60
    assert bench.run(workload=fields).measurement.busy_s is None


@pytest.mark.cuda
def test_a_trial_on_a_gpu_tells_its_kernels_or_nothing_where_the_driver_does_not_record_them(cuda):
    fields = {"global_batch_size": 8, "sequence_length": 64}
    found = cuda.checked(ProfileTask(), workload=fields, config={"per_device_train_batch_size": 4})
    assert found.busy_s is None or {"matrix products", "element-wise", "optimizer"} <= found.busy_s.keys()
