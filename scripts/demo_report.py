# SPDX-License-Identifier: Apache-2.0
"""What demo.sh shows of metrics files: how the loss fell, and the ledger stage by stage."""

import json
import sys


def steps_of(path):
    with open(path, encoding="utf-8") as file:
        return [row for row in map(json.loads, file) if "loss" in row]


def mean(values):
    return sum(values) / len(values)


def show_loss(path, steps):
    """One line for each tenth of the run; an error when a step is missing or the loss did not
    fall."""
    rows = steps_of(path)
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        sys.exit(f"{path} does not hold steps 1 to {steps}, each once")
    width = max(1, steps // 10)
    for first in range(0, steps, width):
        part = rows[first : first + width]
        loss = mean([row["loss"] for row in part])
        rate = mean([row["tokens_per_s"] for row in part])
        span = f"{part[0]['step']:4}-{part[-1]['step']}"
        print(f"steps {span:9} loss {loss:.3f}  {rate:6.0f} tokens/s  {'#' * int(10 * loss)}")
    before, after = (mean([r["loss"] for r in part]) for part in (rows[:width], rows[-width:]))
    if not after < before:
        sys.exit(f"the loss did not fall: {before} at first, {after} at last")
    print(f"the loss fell from {before:.3f} to {after:.3f}")


def show_ledger(paths):
    """Rank 0's bytes after the last step of each file, purposes down, stages across."""
    columns = []
    for path in paths:
        rows = steps_of(path)[-1]["ledger"]
        columns.append({(row["tier"], row["purpose"]): row["bytes"] for row in rows})
    names = dict.fromkeys(name for column in columns for name in column if column[name])
    header = "".join(f"{f'stage {stage}':>14}" for stage in range(len(paths)))
    print(f"{'bytes of rank 0':32}{header}")
    for name in names:
        cells = "".join(f"{column.get(name, 0):14,}" for column in columns)
        print(f"{name[0] + ': ' + name[1]:32}{cells}")
    for tiers in (("device", "host"), ("nvme",)):
        sums = [sum(b for name, b in column.items() if name[0] in tiers) for column in columns]
        print(f"{'all of ' + ' and '.join(tiers):32}" + "".join(f"{total:14,}" for total in sums))


def main():
    if sys.argv[1] == "loss":
        show_loss(sys.argv[2], int(sys.argv[3]))
    else:
        show_ledger(sys.argv[2:])


if __name__ == "__main__":
    main()
