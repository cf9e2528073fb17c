# SPDX-License-Identifier: Apache-2.0
"""A small training job over the C API through ctypes alone, and the same in numpy."""

import ctypes
import os
import threading
from ctypes import byref, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import numpy as np

from zspill import _lib as zs

# Units, parameters, shapes: odd sizes, both groups in a unit, one smaller than a shard.
UNITS = {
    "embed": {"embed.weight": (53, 7)},
    "block": {"block.weight": (31, 17), "block.bias": (17,), "block.tiny": (1,)},
    "head": {"head.weight": (7, 129)},
}
SHAPES = {name: shape for params in UNITS.values() for name, shape in params.items()}
LR, BETAS, EPS, DECAY, MAX_NORM = 3e-3, (0.9, 0.98), 1e-8, 0.1, 2.0


def start(name):
    """As large as weights are, so that 1e-6 is not a rounding or two away."""
    rng = np.random.default_rng(sum(name.encode()))
    return np.float32(0.1) * rng.standard_normal(SHAPES[name], np.float32)


def gradient(name, step, rank):
    rng = np.random.default_rng([sum(name.encode()), step, rank])
    return rng.standard_normal(SHAPES[name], np.float32)


def adamw(world, steps):
    """What the parameters are after steps, by numpy in double."""
    weights = {name: start(name).astype(np.float64) for name in SHAPES}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(1, steps + 1):
        grads = {
            name: sum(gradient(name, t, r).astype(np.float64) for r in range(world)) / world
            for name in SHAPES
        }
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        clip = min(1.0, MAX_NORM / (norm + 1e-6))
        for name, shape in SHAPES.items():
            g = grads[name] * clip
            if len(shape) > 1:
                weights[name] *= 1 - LR * DECAY
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
            v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
            denominator = np.sqrt(v[name] / (1 - BETAS[1] ** t)) + EPS
            weights[name] -= LR * m[name] / (1 - BETAS[0] ** t) / denominator
    return weights, norm


def address(array):
    return array.ctypes.data_as(c_void_p)


class Job:
    """One rank of the job."""

    def __init__(self, lib, comm, **config):
        self.lib = lib
        self.comm = comm
        self.rank, self.world = lib.zs_comm_rank(comm), lib.zs_comm_world(comm)
        self.engine = c_void_p()
        for name in ("state_dir", "param_dir"):
            if config.get(name):
                config[name] = os.fsencode(config[name])
        config = zs.EngineConfig.default(lib, **{"threads": 2, **config})
        lib.zs_engine_open(byref(config), comm, byref(self.engine))
        self.params, self.units = {}, {}
        self.done = 0
        try:
            self.register()
            lib.zs_engine_commit(self.engine)
        except Exception:
            self.close()
            raise

    def close(self):
        self.lib.zs_engine_close(byref(self.engine))

    def group(self, decay):
        hyper = zs.GroupConfig.default(
            self.lib, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=decay
        )
        out = c_int32()
        self.lib.zs_group_add(self.engine, byref(hyper), byref(out))
        return out.value

    def param(self, name, shape, group):
        dims = (c_int64 * len(shape))(*shape)
        config = zs.ParamConfig.default(
            self.lib, name=name.encode(), ndim=len(shape), shape=dims, group=group
        )
        out = c_int32()
        self.lib.zs_param_add(self.engine, byref(config), byref(out))
        return out.value

    def register(self):
        decayed, plain = self.group(DECAY), self.group(0)
        for unit, params in UNITS.items():
            for name, shape in params.items():
                self.params[name] = self.param(name, shape, decayed if len(shape) > 1 else plain)
            members = (c_int32 * len(params))(*(self.params[name] for name in params))
            out = c_int32()
            self.lib.zs_unit_add(self.engine, unit.encode(), members, len(members), byref(out))
            self.units[unit] = out.value

    def load(self):
        for name, param in self.params.items():
            first, count = c_uint64(), c_uint64()
            self.lib.zs_param_local(self.engine, param, byref(first), byref(count))
            values = start(name).ravel()[first.value : first.value + count.value].copy()
            self.lib.zs_param_write(self.engine, param, first, count, zs.FP32, address(values))
        self.lib.zs_params_publish(self.engine)

    def micro_batch(self):
        """Forward and backward of the next step, up to where zs_step comes."""
        for unit in UNITS:
            self.lib.zs_unit_acquire(self.engine, self.units[unit])
            self.lib.zs_unit_release(self.engine, self.units[unit])
        self.lib.zs_grad_begin(self.engine, 1)
        for unit in reversed(UNITS):
            self.lib.zs_unit_acquire(self.engine, self.units[unit])
            for name in UNITS[unit]:
                grad = gradient(name, self.done + 1, self.rank)
                self.lib.zs_grad_ready(self.engine, self.params[name], address(grad), zs.FP32)
            self.lib.zs_unit_release(self.engine, self.units[unit])
        self.lib.zs_grad_finish(self.engine)

    def step(self):
        how = zs.StepConfig.default(self.lib, grad_scale=1 / self.world, max_norm=MAX_NORM)
        info = zs.StepInfo.default(self.lib)
        self.lib.zs_step(self.engine, byref(how), byref(info))
        self.done += 1
        assert info.step == self.done and not info.skipped
        return info

    def run(self, steps):
        info = None
        for _ in range(steps):
            self.micro_batch()
            info = self.step()
        return info

    def weights(self):
        """Collective: whole parameters by name."""
        found = {}
        for unit, params in UNITS.items():
            self.lib.zs_unit_acquire(self.engine, self.units[unit])
            for name in params:
                data = c_void_p()
                self.lib.zs_param_data(self.engine, self.params[name], byref(data))
                size = int(np.prod(SHAPES[name]))
                raw = ctypes.string_at(data.value, 4 * size)
                found[name] = np.frombuffer(raw, np.float32).reshape(SHAPES[name])
            self.lib.zs_unit_release(self.engine, self.units[unit])
        return found

    def commit(self, user=b""):
        self.lib.zs_state_commit(self.engine, user, len(user))

    def resume(self):
        """User bytes of what was found, or None."""
        found = ctypes.c_int()
        user = ctypes.create_string_buffer(zs.USER_BYTES_MAX)
        size = c_size_t(len(user))
        self.lib.zs_state_resume(self.engine, byref(found), user, byref(size))
        return user.raw[: size.value] if found.value else None

    def ledger(self):
        """{(tier, purpose): (bytes, peak)}"""
        count = c_size_t()
        self.lib.zs_memory_report(self.engine, None, 0, byref(count))
        rows = (zs.MemoryRow * count.value)()
        self.lib.zs_memory_report(self.engine, rows, count, byref(count))
        return {(row.tier, row.purpose.decode()): (row.bytes, row.peak) for row in rows}


def largest_difference(weights, expected):
    return max(float(np.abs(weights[name] - expected[name]).max()) for name in SHAPES)


def in_threads(lib, world, body, timeout_s=60.0):
    """body(rank, comm) on a thread for each rank of a world; its results in order."""
    comms = (c_void_p * world)()
    lib.zs_comm_open_threads(world, timeout_s, comms)
    results, errors = [None] * world, []

    def rank_main(rank):
        try:
            results[rank] = body(rank, c_void_p(comms[rank]))
        except BaseException as error:  # pylint: disable=broad-except
            errors.append((rank, error))
            lib.zs_comm_abort(comms[rank], str(error).encode())

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(world):
        handle = c_void_p(comms[rank])
        lib.zs_comm_close(byref(handle))
    if errors:
        rank, error = errors[0]
        raise AssertionError(f"rank {rank} failed: {error!r}") from error
    return results


class PipeTransport:
    """Collectives of two processes over a duplex pipe. Rank 0 speaks first, so that no message
    waits for room in the pipe while the other side does the same."""

    def __init__(self, connection, rank):
        self.connection = connection
        self.rank = rank

    def _exchange(self, data):
        if self.rank == 0:
            self.connection.send_bytes(data)
            return self.connection.recv_bytes()
        got = self.connection.recv_bytes()
        self.connection.send_bytes(data)
        return got

    def all_gather(self, send):
        mine = bytes(send)
        other = self._exchange(mine)
        return mine + other if self.rank == 0 else other + mine

    def all_to_all(self, send):
        data = bytes(send)
        half = len(data) // 2
        parts = data[:half], data[half:]
        other = self._exchange(parts[1 - self.rank])
        mine = parts[self.rank]
        return mine + other if self.rank == 0 else other + mine

    def barrier(self):
        self._exchange(b"")
