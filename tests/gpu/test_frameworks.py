"""PyTorch, JAX and CuPy in a slice: they see it, run out of it with their own error, and go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from slices import MIB, Gpu, Slice, needs

TORCH = """
    import torch
    free, total = torch.cuda.mem_get_info()
    print(total)
    print(torch.cuda.get_device_properties(0).total_memory)
    held = []
    try:
        while True:
            held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as e:
        pass
    print(len(held) * 64)
    try:
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise SystemExit("more was granted after running out")
    held.clear()
    torch.cuda.empty_cache()
    a = torch.randn(1024, 1024, device="cuda")
    assert torch.isfinite(a @ a).all()
"""


@needs("torch")
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_torch_runs_out_at_the_limit_and_goes_on(slice_of: Callable[..., Slice], allocator: str) -> None:
    mib = 5120
    env = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator} if allocator else {}
    seen, properties, held = map(int, slice_of(mib).run(TORCH, env=env).split())
    assert seen == properties == mib * MIB
    # Steps of 64 MiB leave up to one step, and the reserve of the allocator.
    assert mib - 256 <= held <= mib


@needs("torch")
def test_the_context_that_torch_makes_is_charged_once(slice_of: Callable[..., Slice]) -> None:
    """CUDA's runtime makes it, which may do so past the function that libfgpu stands before."""
    code = """
        import torch
        for _ in range(2):
            free, total = torch.cuda.mem_get_info()
            print((total - free) >> 20)
            held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    """
    assert slice_of(4096, context_mib=512).run(code).split() == ["512", "576"]


@needs("torch")
def test_torch_graphs_replay_in_a_slice(slice_of: Callable[..., Slice]) -> None:
    code = """
        import torch
        model = torch.nn.Linear(1024, 1024).cuda()
        x = torch.randn(64, 1024, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), torch.no_grad():
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            y = model(x)
        for seed in range(3):
            x.copy_(torch.randn(64, 1024, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.allclose(y, model(x), atol=1e-5)
        print("replayed")
    """
    assert "replayed" in slice_of(4096).run(code)
    assert "replayed" in slice_of(4096, slots="0-50").run(code)


@needs("torch")
def test_a_model_trains_in_a_slice(slice_of: Callable[..., Slice]) -> None:
    code = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
        step = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(512, 64, device="cuda")
        y = x.sum(1, keepdim=True)
        losses = []
        for _ in range(100):
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.zero_grad(); loss.backward(); step.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, losses[::20]
        print("trained")
    """
    assert "trained" in slice_of(2048, slots="25-75").run(code)


@needs("jax")
def test_jax_takes_its_three_quarters_of_the_slice(slice_of: Callable[..., Slice], gpu: Gpu) -> None:
    code = """
        import jax, jax.numpy as jnp
        x = jnp.ones((1024, 1024))
        assert float((x @ x)[0, 0]) == 1024
        stats = jax.local_devices()[0].memory_stats()
        print(stats["bytes_limit"])
        try:
            jnp.ones((8 << 30,), dtype=jnp.uint8).block_until_ready()
        except Exception as e:
            assert "RESOURCE_EXHAUSTED" in str(e) or "out of memory" in str(e).lower(), e
        else:
            raise SystemExit("8 GiB were granted")
        assert float((x @ x)[0, 0]) == 1024
    """
    taken = int(slice_of(6144).run(code).split()[-1])
    assert 0.6 * 6144 * MIB <= taken <= 6144 * MIB


@needs("cupy")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_cupy_pools_run_out_at_the_limit_and_go_on(
    slice_of: Callable[..., Slice], asynchronous: bool
) -> None:
    code = """
        import sys, cupy
        if sys.argv[1] == "True":
            cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        print(cupy.cuda.Device(0).mem_info[1])
        held = []
        try:
            while True:
                held.append(cupy.empty(64 << 20, dtype=cupy.uint8))
        except Exception as e:
            assert "memory" in str(e).lower(), e
        print(len(held) * 64)
        held.clear()
        if sys.argv[1] != "True":
            cupy.get_default_memory_pool().free_all_blocks()
        cupy.cuda.Device(0).synchronize()
        assert int(cupy.arange(1000).sum()) == 499500
    """
    total, held = map(int, slice_of(4096).run(code, str(asynchronous)).split())
    assert total == 4096 * MIB
    assert 4096 - 256 <= held <= 4096


@needs("torch")
def test_managed_memory_is_charged_or_refused(slice_of: Callable[..., Slice]) -> None:
    # Tiny sizes only: a session that pages managed memory in and out of a shared GPU disturbs its neighbours.
    code = """
        import ctypes, torch
        torch.zeros(1, device="cuda")
        cuda = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_uint64()
        print(cuda.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(1 << 20), 1))
        print(cuda.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(2049 << 20), 1))
    """
    assert slice_of(2048).run(code).split() == ["0", "2"]
    assert slice_of(2048, managed="refuse").run(code).split()[0] == "801"
