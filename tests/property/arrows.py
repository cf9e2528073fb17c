# SPDX-License-Identifier: Apache-2.0
"""Checks that includes follow the arrows of docs/architecture.md: each room includes itself, the
rooms below it and zspill.h, and libraries stay in the rooms that may know them."""

import os
import re
import sys
import tempfile

ROOMS = {
    "include": set(),
    "base": set(),
    "io": {"base"},
    "device": {"base"},
    "kernels": {"base"},
    "offload": {"base", "io", "device", "kernels"},
    "zero": {"base", "io", "device", "kernels", "offload"},
    # The program reaches units, gathers, gradients, steps and state through zspill.h alone.
    "model": {"base", "device", "kernels"},
    "cli": {"base", "device", "kernels", "model"},
}
# What reports on disks, and what works on a run's state at rest, without an engine, may look at the
# files' formats.
AT_REST = {"offload/reader.h", "offload/store.h", "zero/header.h", "zero/manifest.h"}
AT_REST |= {"zero/saved.h"}
EXTRA = {
    # libzspill-cuda.so: one thin file calls CUDA's run time, one entry names all that is in it.
    "device/cuda/plugin.c": {"kernels/cuda/math.h", "kernels/cuda/nn.h", "zero/nccl/nccl.h"},
    "kernels/cuda/": {"device"},
    "cli/doctor.c": {"io"},
    "cli/export.c": AT_REST,
    "cli/inspect.c": AT_REST,
    "cli/relocate.c": AT_REST,
    "cli/states_file.c": AT_REST,
    "cli/states_file.h": AT_REST,
    "cli/verify.c": AT_REST,
}
LIBRARIES = {
    "cuda_runtime.h": {"kernels"},
    "cuda_runtime_api.h": {"device", "kernels"},
    "nccl.h": {"zero"},
    "liburing.h": {"io"},
    "libaio.h": {"io"},
    "mpi.h": {"zero"},
    "cblas.h": {"model", "cli"},
    "jansson.h": {"model", "cli"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def resolve(root, folder, name):
    for base in (folder, root, os.path.join(root, "include")):
        path = os.path.normpath(os.path.join(base, name))
        if os.path.isfile(path):
            return os.path.relpath(path, root)
    return None


def check_file(root, path):
    """Yields one line for each include that is against the arrows."""
    room = path.split("/")[0]
    allowed = ROOMS[room] | {room}
    for key, more in EXTRA.items():
        if path == key or (key.endswith("/") and path.startswith(key)):
            allowed = allowed | more
    with open(os.path.join(root, path), encoding="utf-8") as file:
        text = file.read()
    for match in INCLUDE.finditer(text):
        where = f"{path}:{text.count(chr(10), 0, match.start(2)) + 1}"
        quote, name = match.groups()
        if quote == "<":
            owners = LIBRARIES.get(name)
            if owners is not None and room not in owners:
                yield f"{where}: <{name}> belongs to {' and '.join(sorted(owners))}"
            continue
        target = resolve(root, os.path.join(root, os.path.dirname(path)), name)
        if target is None:
            yield f'{where}: "{name}" is no file of the project (system headers take <>)'
        elif target != "include/zspill.h" and not (
            target in allowed or target.split("/")[0] in allowed
        ):
            yield f'{where}: {room} must not include "{name}"'


def check_tree(root):
    files, problems = 0, []
    for room in ROOMS:
        for folder, _, names in os.walk(os.path.join(root, room)):
            for name in sorted(names):
                if name.endswith((".c", ".h", ".cu", ".cuh")):
                    files += 1
                    path = os.path.relpath(os.path.join(folder, name), root)
                    problems += check_file(root, path)
    return files, problems


def check_the_check():
    """The check finds what it is there to find."""
    files = {
        "include/zspill.h": "#include <stdint.h>\n",
        "base/log.h": '#include "zspill.h"\n',
        "base/log.c": '#include "log.h"\n#include "io/io.h"\n',
        "io/io.h": '#include "base/log.h"\n#include <liburing.h>\n',
        "kernels/adam.c": '#include "device/device.h"\n',
        "device/device.h": "",
        "offload/store.h": '#include "io/io.h"\n#include "kernels/gone.h"\n',
        "zero/engine.c": '#include "offload/store.h"\n#include <cblas.h>\n',
        "model/model.c": '#include "offload/store.h"\n#include "base/log.h"\n',
        "cli/inspect.c": '#include "offload/store.h"\n  # include "zero/engine.h"\n',
        "zero/engine.h": "",
    }
    expected = [
        'base/log.c:2: base must not include "io/io.h"',
        'kernels/adam.c:1: kernels must not include "device/device.h"',
        'offload/store.h:2: "kernels/gone.h" is no file of the project (system headers take <>)',
        "zero/engine.c:2: <cblas.h> belongs to cli and model",
        'model/model.c:1: model must not include "offload/store.h"',
        'cli/inspect.c:2: cli must not include "zero/engine.h"',
    ]
    with tempfile.TemporaryDirectory() as root:
        for path, text in files.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        _, problems = check_tree(root)
    assert problems == expected, "\n".join(problems)


def main():
    check_the_check()
    root = os.environ.get("ZSPILL_SOURCE_ROOT") or os.path.join(os.path.dirname(__file__), "../..")
    files, problems = check_tree(os.path.abspath(root))
    print("\n".join(problems) if problems else f"{files} files keep to the arrows")
    return 1 if problems or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
