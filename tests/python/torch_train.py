# SPDX-License-Identifier: Apache-2.0
"""Small models of each architecture, made by transformers, trained by zspill and by torch side by
side; what zspill saves loads in transformers and gives the loss that zspill reports."""

import os
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers
from torch_common import evaluate, load, mean_nll, step_rows, zspill

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}
SHARDED = ("mistral", "qwen3")  # read and written as several files with an index
ROWS, SEQ, STEPS, GLOBAL_BATCH = 24, 32, 6, 4
LR, DECAY, CLIP = 3e-3, 0.1, 0.5


def make_data(path):
    rng = np.random.default_rng(7)
    ids = rng.integers(0, SIZES["vocab_size"], (ROWS, SEQ), dtype=np.int32)
    labels = ids.copy()
    for row in labels:
        row[: rng.integers(1, SEQ - 2)] = -100
    safetensors.numpy.save_file({"input_ids": ids, "labels": labels}, path)
    return ids, labels


def train_torch(model, ids, labels):
    """Losses and gradient norms of the steps, in double."""
    model = model.double().train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    rows = []
    for step in range(STEPS):
        batch = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        target = torch.as_tensor(labels[batch]).long()
        logits = model(input_ids=torch.as_tensor(ids[batch]).long()).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows


def check(name, folder):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    source, out = os.path.join(folder, "model"), os.path.join(folder, "out")
    # So that norms and biases, which start as ones and zeros, take part.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(source, max_shard_size="100KB" if name in SHARDED else "1GB")
    data = os.path.join(folder, "data.safetensors")
    metrics = os.path.join(folder, "metrics.jsonl")
    ids, labels = make_data(data)
    zspill(
        *("train", "--model", source, "--data", data, "--out", out, "--metrics", metrics),
        *("--ranks", 2, "--micro-batch", 1, "--grad-accum", 2, "--zero-stage", 3),
        *("--offload-optimizer", f"nvme:{folder}/states", "--offload-params", "host"),
        *("--steps", STEPS, "--shuffle", "off", "--lr", LR, "--weight-decay", DECAY),
        *("--clip", CLIP, "--max-shard-size", "100K" if name in SHARDED else 0),
    )
    for written in source, out:
        index = os.path.join(written, "model.safetensors.index.json")
        assert os.path.exists(index) == (name in SHARDED), written
    ours = [(row["loss"], row["grad_norm"]) for row in step_rows(metrics)]
    theirs = train_torch(load(source), ids, labels)
    assert len(ours) == STEPS, ours
    for step, (mine, other) in enumerate(zip(ours, theirs), 1):
        for a, b in zip(mine, other):
            assert abs(a - b) <= 1e-4 * abs(b), (name, step, mine, other)
    reported = evaluate(out, data)
    expected = mean_nll(load(out), ids, labels)
    assert abs(reported - expected) < 1e-4, (name, reported, expected)
    print(f"{name}: {STEPS} steps as torch's, saved model has NLL {reported:.6f} in both")


def main():
    torch.set_num_threads(1)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            check(name, folder)


if __name__ == "__main__":
    main()
