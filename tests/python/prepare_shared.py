# SPDX-License-Identifier: Apache-2.0
# needs: tokenizers numpy safetensors jinja2
"""zspill.prepare on real conversations with the Qwen3 tokenizer: each kept token is accounted
for."""

import collections
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.numpy

from common import test_data
from zspill import prepare

SEQ_LEN = 2048


def check(tokenizer_folder, path, template_args, lead):
    """Every conversation of path is in the file, its targets lead + answer + end of turn, and
    everything else is masked."""
    with open(path, encoding="utf-8") as file:
        conversations = [json.loads(line)["messages"] for line in file]
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.safetensors")
        command = [sys.executable, "-m", "zspill.prepare", path, "--tokenizer", tokenizer_folder]
        command += ["--seq-len", str(SEQ_LEN), "--out", out, *template_args]
        subprocess.run(command, check=True)
        arrays = safetensors.numpy.load_file(out)
    core = prepare.Tokenizer(tokenizer_folder).core

    def decode(ids):
        return core.decode([int(x) for x in ids], skip_special_tokens=False)

    found = collections.Counter()
    for ids, labels, positions in zip(
        arrays["input_ids"], arrays["labels"], arrays["position_ids"]
    ):
        starts = np.flatnonzero(positions == 0)
        for start, end in zip(starts, [*starts[1:], SEQ_LEN]):
            counted = np.flatnonzero(labels[start:end] != -100) + start
            if not len(counted):
                assert end == SEQ_LEN, "only the padding at the end of a row has no target"
                continue
            assert (np.diff(counted) == 1).all(), "one answer is one span"
            assert (labels[counted] == ids[counted]).all()
            before = decode(ids[start : counted[0]])
            answer = decode(labels[counted])
            found[before, answer] += 1
    expected = collections.Counter()
    for conversation in conversations:
        assert [message["role"] for message in conversation] == ["user", "assistant"]
        question, answer = (message["content"] for message in conversation)
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if template_args:
            prompt += "<think>\n\n</think>\n\n"
        expected[prompt, lead + answer.lstrip("\n") + "<|im_end|>"] += 1
    assert (
        found == expected
    ), f"not as expected: {list((expected - found) + (found - expected))[:2]}"
    print(f"{path}: {sum(expected.values())} answers found as they should be")


def main():
    shared = test_data()
    qwen3 = os.path.join(shared, "tokenizers", "qwen3")
    receipts = os.path.join(shared, "data", "receipts_chat.jsonl")
    gsm8k = os.path.join(shared, "data", "gsm8k_chat.jsonl")
    # Asked to think or not to (the default), a Qwen3 model itself writes the empty thought.
    check(qwen3, receipts, [], "<think>\n\n</think>\n\n")
    check(qwen3, gsm8k, [], "<think>\n\n</think>\n\n")
    check(qwen3, receipts, ["--template-arg", "enable_thinking=false"], "")


if __name__ == "__main__":
    main()
