#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adam side by side: zspill, its limit, torch's fused AdamW and DeepSpeedCPUAdam.

All take turns in one process, on the same memory wherever their types agree, and who goes first
changes each round. See bench/README.md for what is compared with what.
"""
import argparse
import ctypes
import os
import statistics
import sys
import time

HYPER = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/bench/libzspill-bench-adam.so")
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-deepspeed", action="store_true")
    parser.add_argument("--deepspeed-simd", choices=["native", "avx2"], default="native",
                        help="what DeepSpeed's op is compiled for: its own choice (default), or AVX2")
    args = parser.parse_args()
    if args.parameters % 64 or args.parameters < 64 or args.rounds < 1 or args.threads < 1:
        parser.error("--parameters must be a multiple of 64, --rounds and --threads at least 1")
    return args


ARGS = arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)  # read when torch is loaded
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if ARGS.deepspeed_simd != "native":  # apart from the op of the other kind, which may be built already
    os.environ["TORCH_EXTENSIONS_DIR"] = os.path.expanduser("~/.cache/torch_extensions_avx2")

import torch  # noqa: E402

torch.set_num_threads(ARGS.threads)


class Ours:
    """bench/adam.c through ctypes."""

    def __init__(self, path, threads):
        try:
            self.library = ctypes.CDLL(os.path.abspath(path))
        except OSError as error:
            sys.exit(f"adam.py: {error}: build zspill first, or say where it is with --library")
        self.library.bench_adam_open.restype = ctypes.c_void_p
        for name in ("bench_adam_ours", "bench_adam_limit"):
            getattr(self.library, name).restype = ctypes.c_double
        self.handle = ctypes.c_void_p(self.library.bench_adam_open(threads))
        if not self.handle:
            sys.exit("adam.py: bench_adam_open failed (is ZSPILL_ISA set to an unknown level?)")

    def _call(self, name, arrays, last):
        pointers = [ctypes.c_void_p(None if a is None else a.data_ptr()) for a in arrays]
        return getattr(self.library, name)(self.handle, ctypes.c_uint64(arrays[0].numel()),
                                           *pointers, last)

    def step(self, arrays, step):
        return self._call("bench_adam_ours", arrays, ctypes.c_uint64(step))

    def limit(self, arrays, helped):
        return self._call("bench_adam_limit", arrays, ctypes.c_int(helped))


def huge(numel, dtype):
    """Memory in huge pages where the system allows it, for all contenders alike."""
    tensor = torch.empty(numel, dtype=dtype)
    page = 4096
    first = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes - first) // page * page
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), 14)
    return tensor.zero_()


def peer(optimizer, parameter, exp_avg, exp_avg_sq):
    """A step of a torch-like optimizer over given moments."""
    optimizer.step()
    state = optimizer.state[parameter]
    state["exp_avg"], state["exp_avg_sq"] = exp_avg, exp_avg_sq

    def step():
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return step


def torch_adamw(parameter):
    return torch.optim.AdamW([parameter], fused=True, **HYPER)


def deepspeed_adam(parameter):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    if ARGS.deepspeed_simd == "avx2":
        from deepspeed.ops.op_builder import CPUAdamBuilder
        CPUAdamBuilder.simd_width = lambda self: "-D__AVX256__"
        CPUAdamBuilder.cpu_arch = lambda self: "-march=x86-64-v3"
    return DeepSpeedCPUAdam([parameter], adamw_mode=True, fp32_optimizer_states=True, **HYPER)


def parameter_with(data, grad):
    parameter = torch.nn.Parameter(data)
    parameter.grad = grad
    return parameter


def check(ours):
    """Ours does what torch does."""
    torch.manual_seed(1)
    weights, grad = torch.randn(1003), torch.randn(1003)
    arrays = [weights.clone(), torch.zeros(1003), torch.zeros(1003), grad, None]
    parameter = parameter_with(weights.clone(), grad)
    optimizer = torch_adamw(parameter)
    for step in range(1, 6):
        ours.step(arrays, step)
        optimizer.step()
    worst = (arrays[0] - parameter.data).abs().max().item()
    if not worst < 1e-6:
        sys.exit(f"adam.py: ours and torch's AdamW differ by {worst} after 5 steps")


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def compare(title, contenders):
    names = list(contenders)
    seconds = {name: [] for name in names}
    for r in range(-2, ARGS.rounds):
        shift = r % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(0.02)  # idle OpenMP threads spin for a while before they sleep
            elapsed = contenders[name]()
            if r >= 0:
                seconds[name].append(elapsed)
    print(f"\n{title}")
    print(f"  {'':42}{'ms':>9}  {'(p10 to p90)':20}{'/ ours':>8}  (p10 to p90)")
    for name in names:
        ratio = [t / o for t, o in zip(seconds[name], seconds["ours"])]
        spread = [f"{scale * percentile(values, share):.{digits}f}"
                  for values, scale, digits in ((seconds[name], 1e3, 1), (ratio, 1, 3))
                  for share in (0.1, 0.9)]
        print(f"  {name:42}{1e3 * statistics.median(seconds[name]):9.2f}"
              f"  {'(' + spread[0] + ' to ' + spread[1] + ')':20}"
              f"{statistics.median(ratio):8.3f}  ({spread[2]} to {spread[3]})", flush=True)


def main():
    ours = Ours(ARGS.library, ARGS.threads)
    check(ours)
    n = ARGS.parameters
    steps = iter(range(1, 1 << 30))
    master, exp_avg, exp_avg_sq = (huge(n, torch.float32) for _ in range(3))
    grad, half_grad = huge(n, torch.float32), huge(n, torch.bfloat16)
    working = huge(n, torch.bfloat16)
    master.normal_()
    grad.normal_()
    half_grad.copy_(grad)
    working.copy_(master)
    print(f"{n} parameters, {ARGS.threads} threads, torch {torch.__version__} "
          f"({torch.backends.cpu.get_cpu_capability()}), DeepSpeed "
          f"{'left out' if ARGS.no_deepspeed else ARGS.deepspeed_simd}, {ARGS.rounds} rounds")

    def mine(arrays):
        return {
            "ours": lambda: ours.step(arrays, next(steps)),
            "limit: loads and stores": lambda: ours.limit(arrays, 0),
            "limit with our prefetches and stores": lambda: ours.limit(arrays, 1),
        }

    contenders = mine([master, exp_avg, exp_avg_sq, grad, None])
    parameter = parameter_with(master, grad)
    contenders["torch AdamW(fused)"] = peer(torch_adamw(parameter), parameter, exp_avg, exp_avg_sq)
    if not ARGS.no_deepspeed:
        parameter = parameter_with(master, grad)
        contenders["DeepSpeedCPUAdam"] = peer(deepspeed_adam(parameter), parameter, exp_avg,
                                              exp_avg_sq)
    compare("fp32 weights, gradients and moments", contenders)

    contenders = mine([master, exp_avg, exp_avg_sq, half_grad, working])
    parameter = parameter_with(working, half_grad)
    contenders["torch AdamW(fused), moments bf16 too"] = peer(
        torch_adamw(parameter), parameter, huge(n, torch.bfloat16), huge(n, torch.bfloat16))
    if not ARGS.no_deepspeed:
        parameter = parameter_with(working, half_grad)
        contenders["DeepSpeedCPUAdam, no master"] = peer(deepspeed_adam(parameter), parameter,
                                                         exp_avg, exp_avg_sq)
    compare("bf16 weights and gradients, fp32 master and moments", contenders)


if __name__ == "__main__":
    main()
