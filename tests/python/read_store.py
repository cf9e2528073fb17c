# SPDX-License-Identifier: Apache-2.0
"""Reads the state of a run by docs/format.md alone, with nothing but the standard library:
read(DIR[, COMMIT]) is (commit, step, {name: (dtype, master, exp_avg, exp_avg_sq)}), arrays as array("f")."""

import array
import os
import struct
import sys

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for value in data:
        crc = crc >> 8 ^ TABLE[(crc ^ value) & 255]
    return crc ^ 0xFFFFFFFF


def up(value, to):
    return (value + to - 1) // to * to


def manifest(folder):
    """Its numbers by key, and for each flat buffer its type and [(elements, name)]."""
    with open(os.path.join(folder, "zspill.manifest"), "rb") as file:
        text = file.read()
    body, last = text[: text.rindex(b"crc32c")], text[text.rindex(b"crc32c") :]
    assert int(last.split()[1], 16) == crc32c(body), "manifest: checksum"
    lines = body.decode().split("\n")
    assert lines[0] == "zspill manifest 2", lines[0]
    bases = {"fingerprint": 16, "run": 16}
    keys = {k: int(v, bases.get(k, 10)) for k, v in map(str.split, lines[1:9])}
    flats = []
    for line in lines[9:-1]:
        key, number, rest = line.split(" ", 2)
        if key == "flat":
            flats.append((rest, []))
        else:
            flats[-1][1].append((int(number), rest))
    assert len(flats) == keys["flats"]
    return keys, flats


def superblocks(blob):
    """{number of the commit: (superblock, offset of the first chunk)}"""
    assert blob[:16] == b"zspill states 1\n", "store: label"
    assert struct.pack("<I", crc32c(blob[:32])) == blob[32:36], "store: checksum of the label"
    room, more, length = struct.unpack_from("<IIQ", blob, 16)
    assert len(blob) >= length
    found, chunks = {}, 4096 + (2 + more) * room
    for area in range(4096, chunks, room):
        magic, version, size, crc = struct.unpack_from("<8sIII", blob, area)
        data = bytearray(blob[area : area + size])
        data[16:20] = bytes(4)
        if magic == b"ZSPSUPER" and version == 2 and crc32c(data) == crc:
            found[struct.unpack_from("<Q", data, 88)[0]] = bytes(data), chunks
    return found


def shards(blob, superblock, at, keys, rank):
    """[(master, exp_avg, exp_avg_sq)] of one rank's store."""
    world, own = struct.unpack_from("<II", superblock, 32)
    chunk, count, _, _, run, slots = struct.unpack_from("<QQQQQI", superblock, 64)
    assert (world, own, run, slots) == (keys["world"], rank, keys["run"], keys["slots"])
    record, out = 128 + 16 * count, []
    for shard in range(count):
        (numel,) = struct.unpack_from("<Q", superblock, 128 + 16 * shard)
        arrays = [array.array("f") for _ in range(3)]
        for first in range(0, numel, chunk):
            n = min(chunk, numel - first)
            stride = up(4 * n, 4096)
            slot, *crcs = struct.unpack_from("<4I", superblock, record)
            for i, crc in enumerate(crcs):
                begin = at + (3 * slot + i) * stride
                data = blob[begin : begin + 4 * n]
                assert crc32c(data) == crc, f"rank {rank}, shard {shard}, element {first}: checksum"
                arrays[i].frombytes(data)
            at += 3 * slots * stride
            record += 16
        if sys.byteorder == "big":
            for values in arrays:
                values.byteswap()
        out.append(arrays)
    return out


def read(folder, commit=None):
    keys, flats = manifest(folder)
    suffix = f".g{keys['generation']}.state" if keys["generation"] > 1 else ".state"
    ranks, blobs = range(keys["world"]), []
    for rank in ranks:
        with open(os.path.join(folder, f"zspill-rank{rank:05d}{suffix}"), "rb") as file:
            blobs.append(file.read())
    supers = [superblocks(blob) for blob in blobs]
    commit = commit or max(set.intersection(*(set(found) for found in supers)))
    (step,) = struct.unpack_from("<Q", supers[0][commit][0], 56)
    parts = [shards(blobs[r], *supers[r][commit], keys, r) for r in ranks]
    params = {}
    for number, (dtype, members) in enumerate(flats):
        whole = [array.array("f") for _ in range(3)]
        for part in parts[:1] if keys["replicated"] else parts:
            for values, more in zip(whole, part[number]):
                values.extend(more)
        at = 0
        for numel, name in members:
            params[name] = (dtype, *(values[at : at + numel] for values in whole))
            at = up(at + numel, 32)
    return commit, step, params
