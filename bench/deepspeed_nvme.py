#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step over states on NVMe: zspill against DeepSpeed, turn and turn about.

ZeRO-3, one rank, fp32 states on one disk, bf16 weights and gradients in memory, on the CPU. See
bench/README.md for what is timed.
"""
import argparse
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import time
from ctypes import byref, c_int32, c_int64, c_void_p

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "python"))
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", nargs="?", default=".", help="on the disk in question")
    parser.add_argument("--library", default="build/libzspill.so")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    # DeepSpeed's. Of its I/O settings, the best of those tried (bench/README.md).
    parser.add_argument("--sub-group-size", type=float, default=5e6)
    parser.add_argument("--buffer-count", type=int, default=20)
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=128)
    parser.add_argument("--aio-threads", type=int, default=2)
    parser.add_argument("--serial", action="store_true", help="without pipeline_read and _write")
    args = parser.parse_args()
    if min(args.layers, args.width, args.pairs, args.threads) < 1:
        parser.error("--layers, --width, --pairs and --threads must be at least 1")
    return args


ARGS = arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)  # read when torch is loaded
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# What a launcher would say of a single process.
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")

import deepspeed  # noqa: E402
import torch  # noqa: E402

from zspill import _lib as zs  # noqa: E402

torch.set_num_threads(ARGS.threads)


class Ours:
    """Through the C API, one unit a layer, as `zspill train` has one a block."""

    def __init__(self, folder):
        try:
            self.lib = zs.load(os.path.abspath(ARGS.library))
        except ImportError as error:
            sys.exit(f"deepspeed_nvme.py: {error}: build zspill first, or say where with --library")
        self.comm, self.engine = c_void_p(), c_void_p()
        self.lib.zs_comm_open_self(byref(self.comm))
        config = zs.EngineConfig.default(
            self.lib, zero_stage=3, optimizer_tier=zs.NVME, param_tier=zs.HOST,
            state_dir=os.fsencode(os.path.join(folder, "zspill")), grad_dtype=zs.BF16,
            threads=ARGS.threads,
        )
        self.lib.zs_engine_open(byref(config), self.comm, byref(self.engine))
        group = c_int32()
        hyper = zs.GroupConfig.default(
            self.lib, lr=HYPER["lr"], beta1=HYPER["betas"][0], beta2=HYPER["betas"][1],
            eps=HYPER["eps"], weight_decay=HYPER["weight_decay"],
        )
        self.lib.zs_group_add(self.engine, byref(hyper), byref(group))
        self.shape = (c_int64 * 2)(ARGS.width, ARGS.width)
        self.params = [self._layer(i, group) for i in range(ARGS.layers)]
        self.lib.zs_engine_commit(self.engine)
        numel = ARGS.width**2
        weights = torch.randn(numel).mul_(0.02)
        for param in self.params:
            self.lib.zs_param_write(self.engine, param, 0, numel, zs.FP32,
                                    c_void_p(weights.data_ptr()))
        self.lib.zs_params_publish(self.engine)
        self.lib.zs_state_commit(self.engine, None, 0)
        self.grad = torch.randn(numel).mul_(1e-3).to(torch.bfloat16)
        self.info = zs.StepInfo.default(self.lib)

    def _layer(self, i, group):
        param, unit = c_int32(), c_int32()
        config = zs.ParamConfig.default(
            self.lib, name=f"layer{i}".encode(), ndim=2, shape=self.shape, dtype=zs.BF16,
            group=group.value,
        )
        self.lib.zs_param_add(self.engine, byref(config), byref(param))
        self.lib.zs_unit_add(self.engine, f"layer{i}".encode(), byref(param), 1, byref(unit))
        return param.value

    def step(self, commit):
        """Seconds from the first gradient handed over, with which reading ahead begins."""
        begin = time.perf_counter()
        self.lib.zs_grad_begin(self.engine, 1)
        for param in reversed(self.params):
            self.lib.zs_grad_ready(self.engine, param, c_void_p(self.grad.data_ptr()), zs.BF16)
        self.lib.zs_grad_finish(self.engine)
        self.lib.zs_step(self.engine, None, byref(self.info))
        if commit:
            self.lib.zs_state_commit(self.engine, None, 0)
        return time.perf_counter() - begin

    def close(self):
        self.lib.zs_engine_close(byref(self.engine))
        self.lib.zs_comm_close(byref(self.comm))


class Theirs:
    def __init__(self, folder):
        pipeline = not ARGS.serial
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": dict(HYPER, betas=list(HYPER["betas"]))},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": int(ARGS.sub_group_size),
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": folder,
                    "buffer_count": ARGS.buffer_count,
                    "pipeline_read": pipeline,
                    "pipeline_write": pipeline,
                },
            },
            "aio": {
                "block_size": ARGS.block_size,
                "queue_depth": ARGS.queue_depth,
                "intra_op_parallelism": ARGS.aio_threads,
                "single_submit": False,
                "overlap_events": True,
            },
        }
        layers = [torch.nn.Linear(ARGS.width, ARGS.width, bias=False) for _ in range(ARGS.layers)]
        model = torch.nn.Sequential(*layers)
        self.engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        self.input = torch.randn(1, ARGS.width).to(torch.bfloat16)

    def step(self):
        """Seconds of its step alone: backward, in which it writes the gradients out, is not counted."""
        self.engine.backward(self.engine(self.input).float().pow(2).mean())
        begin = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - begin


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))]


def line(name, values, unit):
    print(f"{name:<44}{statistics.median(values):>8.3f}  ({percentile(values, 0.1):.3f} to "
          f"{percentile(values, 0.9):.3f}) {unit}")


def main():
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    folder = tempfile.mkdtemp(prefix="zspill-bench-", dir=ARGS.dir)
    try:
        ours, theirs = Ours(folder), Theirs(folder)
        turns = {
            "exit": lambda: ours.step(commit=False),
            "deepspeed": theirs.step,
            "step": lambda: ours.step(commit=True),
        }
        times = {name: [] for name in turns}
        for turn in range(ARGS.pairs + 2):
            names = list(turns)
            names = names[turn % 3:] + names[: turn % 3]
            for name in names:
                os.sync()  # nobody pays for what another one left behind
                times[name].append(turns[name]())
        for values in times.values():
            del values[:2]  # warming up
        nvme = ours.info.tier[zs.NVME]
        numel = ARGS.layers * ARGS.width**2
        print(f"{numel / 1e6:.1f} million parameters, {ARGS.threads} threads, DeepSpeed "
              f"{deepspeed.__version__}; median (10th to 90th percentile) of {ARGS.pairs} rounds")
        print(f"zspill reads {nvme.read_bytes / numel:.1f} bytes a parameter and writes "
              f"{nvme.written_bytes / numel:.1f}")
        line("DeepSpeed, step", times["deepspeed"], "s")
        line("zspill, gradients and step, durability=exit", times["exit"], "s")
        line("zspill, the same and commit, durability=step", times["step"], "s")
        for name in ("exit", "step"):
            ratios = [b / a for a, b in zip(times[name], times["deepspeed"])]
            line(f"DeepSpeed / zspill, durability={name}", ratios, "(target 1.15)" * (name == "exit"))
        ours.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
