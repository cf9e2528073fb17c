#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training side by side: `zspill train` and transformers with torch's fused AdamW, tokens a second.

Both start from the same weights and take the same rows, in fp32, without checkpointing, with the
same number of threads, clipping to norm 1; they take turns, and who goes first changes each round.
See bench/README.md.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a config.json: random weights are made for it")
    parser.add_argument("--zspill", default="build/cli/zspill")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4, help="of a round, the first not counted")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", help="for weights and states, 16 bytes a parameter")
    args = parser.parse_args()
    if min(args.rows, args.rounds, args.threads) < 1 or min(args.seq, args.steps) < 2:
        parser.error("--rows, --rounds, --threads of 1 or more, --seq and --steps of 2 or more")
    return args


ARGS = arguments()
os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)  # read when torch is loaded
# A thread of torch's that waits must not take a core from zspill's turn.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(ARGS.threads)
transformers.utils.logging.disable_progress_bar()
HYPER = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class Torch:
    name = "transformers + torch, fused AdamW"

    def __init__(self, config):
        torch.manual_seed(1)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.train()

    def start(self):
        """Weight decay of matrices only, as zspill's default."""
        weights = list(self.model.parameters())
        groups = [dict(params=[w for w in weights if w.ndim >= 2]),
                  dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **HYPER)

    def run(self, rows):
        seconds, losses = [], []
        for step in range(ARGS.steps):
            ids = torch.from_numpy(rows[step * ARGS.rows:(step + 1) * ARGS.rows].astype(np.int64))
            begin = time.perf_counter()
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        return seconds, losses


class Zspill:
    name = "zspill train"

    def __init__(self, folder):
        self.folder = folder

    def run(self, rows):
        data, out, metrics = (os.path.join(self.folder, name)
                              for name in ("rows.safetensors", "out", "metrics.jsonl"))
        safetensors.numpy.save_file({"input_ids": rows.astype(np.int32)}, data)
        done = subprocess.run(
            [ARGS.zspill, "train", "--model", os.path.join(self.folder, "model"), "--data", data,
             "--out", out, "--metrics", metrics, "--threads", str(ARGS.threads), "--dtype", "fp32",
             "--checkpointing", "off", "--shuffle", "off", "--micro-batch", str(ARGS.rows),
             "--steps", str(ARGS.steps), "--lr", str(HYPER["lr"]), "--beta1", str(HYPER["betas"][0]),
             "--beta2", str(HYPER["betas"][1]), "--eps", str(HYPER["eps"]),
             "--weight-decay", str(HYPER["weight_decay"]), "--clip", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"train.py: {ARGS.zspill} failed:\n{done.stderr}")
        with open(metrics) as file:
            lines = [line for line in map(json.loads, file) if "loss" in line]
        shutil.rmtree(out)
        os.remove(metrics)
        return [line["seconds"] for line in lines], [line["loss"] for line in lines]


def percentile(values, share):
    values = sorted(values)
    return values[round(share * (len(values) - 1))]


def main():
    with open(ARGS.config) as file:
        values = json.load(file)
    config = transformers.AutoConfig.for_model(**values)
    folder = tempfile.mkdtemp(prefix="zspill-bench-", dir=ARGS.dir)
    try:
        measure(config, folder)
    finally:
        shutil.rmtree(folder)


def measure(config, folder):
    peer, ours = Torch(config), Zspill(folder)
    peer.model.save_pretrained(os.path.join(folder, "model"))
    peer.start()
    generator = np.random.default_rng(1)
    rows = generator.integers(0, config.vocab_size, (ARGS.rows * ARGS.steps, ARGS.seq))
    seconds, ratios = {ours.name: [], peer.name: []}, []
    for number in range(ARGS.rounds):
        median = {}
        for contender in (ours, peer) if number % 2 == 0 else (peer, ours):
            taken, losses = contender.run(rows)
            if number == 0:  # both from the same weights
                print(f"{contender.name}: loss {losses[0]:.6f}, after {ARGS.steps} steps "
                      f"{losses[-1]:.6f}", flush=True)
            seconds[contender.name] += taken[1:]
            median[contender.name] = statistics.median(taken[1:])
        ratios.append(median[peer.name] / median[ours.name])
    parameters = sum(p.numel() for p in peer.model.parameters())
    tokens = ARGS.rows * ARGS.seq
    print(f"{parameters} parameters, {ARGS.rows} x {ARGS.seq} tokens, fp32, {ARGS.threads} threads, "
          f"{ARGS.rounds} rounds of {ARGS.steps - 1} steps, torch {torch.__version__} "
          f"({torch.backends.cpu.get_cpu_capability()}), transformers {transformers.__version__}, "
          f"load {os.getloadavg()[0]:.1f}")
    print(f"  {'':36}{'tokens/s':>9}  (p10 to p90)")
    for name, taken in seconds.items():
        speeds = [tokens / s for s in taken]
        print(f"  {name:36}{statistics.median(speeds):9.1f}"
              f"  ({percentile(speeds, 0.1):.1f} to {percentile(speeds, 0.9):.1f})")
    print(f"  {'ratio, round by round':36}{statistics.median(ratios):9.2f}"
          f"  ({min(ratios):.2f} to {max(ratios):.2f})")


main()
