# SPDX-License-Identifier: Apache-2.0
"""What the tests that compare with torch and transformers share."""

import json
import os
import re
import subprocess

import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def zspill(*args, code=0):
    """Runs the program that was just built; its standard output."""
    program = os.path.join(os.environ["ZSPILL_BUILD_ROOT"], "cli", "zspill")
    command = [program, *(str(arg) for arg in args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == code
    ), f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr}"
    return done.stdout


def step_rows(path):
    """The rows of a metrics file that are steps."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [row for row in rows if "loss" in row]


def evaluate(folder, data):
    """The mean NLL that zspill reports for the model in folder."""
    out = zspill("train", "--model", folder, "--eval-data", data, "--steps", 0)
    return float(re.search(r"^eval_loss (\S+)", out, re.MULTILINE).group(1))


def mean_nll(model, ids, labels):
    """Mean loss over the counted labels of all rows, as transformers computes it, in double."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row, row_labels in zip(torch.as_tensor(ids).long(), torch.as_tensor(labels).long()):
            counted = row_labels[1:] != -100
            logits = model(input_ids=row[None]).logits[0, :-1][counted].double()
            total += torch.nn.functional.cross_entropy(
                logits, row_labels[1:][counted], reduction="sum"
            ).item()
            count += int(counted.sum())
    return total / count


def load(folder):
    """The model in folder as transformers loads it, with nothing missing and nothing left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], (problem, info[problem])
    return model.eval()
