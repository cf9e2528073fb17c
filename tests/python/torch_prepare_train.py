# SPDX-License-Identifier: Apache-2.0
"""From conversations to a model that transformers loads: prepare with the Qwen3 tokenizer, a small
Qwen3 with its real vocabulary from --init, stage 3 with states on disk."""

import json
import os
import subprocess
import sys
import tempfile

import safetensors.numpy
import torch
import transformers
from common import test_data
from torch_common import evaluate, load, mean_nll, step_rows, zspill

STEPS, ROWS = 24, 16


def main():
    shared = test_data()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        init, out = os.path.join(folder, "init"), os.path.join(folder, "out")
        metrics = os.path.join(folder, "metrics.jsonl")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            os.path.join(shared, "tokenizers", "qwen3")
        )
        tokenizer.save_pretrained(init)
        with open(os.path.join(shared, "hf_configs", "Qwen3-0.6B.json"), encoding="utf-8") as file:
            config = json.load(file)
        config.update(hidden_size=64, num_hidden_layers=2, intermediate_size=128, head_dim=16)
        config.update(num_attention_heads=4, num_key_value_heads=2, max_window_layers=2)
        config.pop("layer_types", None)
        with open(os.path.join(init, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)

        chats = os.path.join(shared, "data", "receipts_chat.jsonl")
        data = os.path.join(folder, "receipts.safetensors")
        prepare = [sys.executable, "-m", "zspill.prepare", chats, "--tokenizer", init]
        prepare += ["--seq-len", "1024", "--out", data]
        subprocess.run(prepare, check=True)
        zspill(
            *("train", "--init", os.path.join(init, "config.json"), "--data", data),
            *("--out", out, "--metrics", metrics, "--steps", STEPS, "--ranks", 2),
            *("--zero-stage", 3, "--offload-optimizer", f"nvme:{folder}/states"),
            *("--offload-params", f"nvme:{folder}/params", "--lr", 3e-3, "--warmup", 4),
        )
        losses = [row["loss"] for row in step_rows(metrics)]
        assert len(losses) == STEPS, losses
        first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
        assert last < first - 1, losses
        print(f"loss {first:.3f} -> {last:.3f}")

        # In transformers, on rows that each hold one receipt.
        model = load(out)
        subprocess.run([*prepare, "--no-packing"], check=True)
        arrays = {name: array[:ROWS] for name, array in safetensors.numpy.load_file(data).items()}
        few = os.path.join(folder, "few.safetensors")
        safetensors.numpy.save_file(arrays, few)
        reported = evaluate(out, few)
        expected = mean_nll(model, arrays["input_ids"], arrays["labels"])
        assert abs(reported - expected) < 1e-4, (reported, expected)
        print(f"NLL of {ROWS} receipts: {reported:.6f} in both")

        # Fine-tuned once more, from a directory with a tokenizer: that comes along.
        tokenizer.save_pretrained(out)
        again = os.path.join(folder, "again")
        zspill(
            "train", "--model", out, "--data", few, "--out", again, "--steps", 2, "--dtype", "bf16"
        )
        load(again)
        saved = transformers.AutoTokenizer.from_pretrained(again)
        with open(chats, encoding="utf-8") as file:
            messages = json.loads(file.readline())["messages"]
        text = saved.apply_chat_template(messages, tokenize=False)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert saved(text)["input_ids"] == tokenizer(text)["input_ids"]


if __name__ == "__main__":
    main()
