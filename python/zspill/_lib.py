# SPDX-License-Identifier: Apache-2.0
"""The C API of zspill.h, declared for ctypes.

load() returns the library. Its functions are those of the header, with the header's names and
arguments; one that fails raises ZspillError instead of returning a status. Structs are classes of
the same name in capitals (zs_engine_config: EngineConfig); make them with NAME.default(lib), which
calls the library's own initializer where there is one.
"""

import ctypes
import ctypes.util
import os
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_int, c_int32, c_int64
from ctypes import c_size_t, c_uint64, c_void_p

FP32, BF16, FP16 = 0, 1, 2
DEVICE, HOST, NVME = 0, 1, 2
IO_AUTO, IO_URING, IO_POSIX, IO_LIBAIO, IO_URING_PLAIN = 0, 1, 2, 3, 4
REDUCE_MICRO, REDUCE_BOUNDARY = 0, 1
MISSING_ERROR, MISSING_ZERO, MISSING_SKIP = 0, 1, 2
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ, GRAD = 0, 1, 2, 3, 4
OP_SUM, OP_MAX, OP_MIN = 0, 1, 2
TIERS = 3
USER_BYTES_MAX = 4096

STATUS = {
    name: value
    for value, name in enumerate(
        "OK ARG MISUSE NOMEM IO NOSPACE CORRUPT LOCKED EXISTS MISMATCH COMM TIMEOUT UNSUPPORTED"
        " NONFINITE CANCELED FORKED INTERNAL".split()
    )
}


class ZspillError(RuntimeError):
    """A call that failed. status: the number, name: "ZS_ERR_ARG" and so on, message: what the
    library says about it."""

    def __init__(self, call, status, name, message):
        super().__init__(f"{call}: {name}: {message}")
        self.call = call
        self.status = status
        self.name = name
        self.message = message


LOG_FN = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)
MOVE_FN = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t)
BARRIER_FN = ctypes.CFUNCTYPE(c_int, c_void_p)
# The text must stay alive after the callback returns, so the pointer is handed out as a number.
ERROR_FN = ctypes.CFUNCTYPE(c_void_p, c_void_p)
CLOSE_FN = ctypes.CFUNCTYPE(None, c_void_p)


class _Sized(ctypes.Structure):
    """A struct that starts with its own size."""

    _init = None  # the library's initializer

    @classmethod
    def default(cls, lib, **fields):
        self = cls()
        if cls._init is None:
            self.size = ctypes.sizeof(cls)
        else:
            getattr(lib, cls._init)(byref(self))
            if self.size != ctypes.sizeof(cls):
                raise ImportError(
                    f"libzspill's {cls.__name__} has {self.size} bytes and this package's"
                    f" {ctypes.sizeof(cls)}: they are of different versions"
                )
        for name, value in fields.items():
            if not hasattr(cls, name):
                raise AttributeError(f"{cls.__name__} has no field {name}")
            setattr(self, name, value)
        return self


class CommCallbacks(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("cookie", c_void_p),
        ("all_gather", MOVE_FN),
        ("all_to_all", MOVE_FN),
        ("barrier", BARRIER_FN),
        ("error", ERROR_FN),
        ("close", CLOSE_FN),
    ]


class EngineConfig(_Sized):
    _init = "zs_engine_config_init"
    _fields_ = [
        ("size", c_size_t),
        ("zero_stage", c_int),
        ("optimizer_tier", c_int),
        ("param_tier", c_int),
        ("state_dir", c_char_p),
        ("param_dir", c_char_p),
        ("io_engine", c_int),
        ("grad_dtype", c_int),
        ("reduce", c_int),
        ("grad_accum_steps", c_int),
        ("missing_grad", c_int),
        ("threads", c_int),
        ("pool", c_void_p),
        ("buffer_bytes", c_uint64),
        ("chunk_numel", c_uint64),
        ("max_live_params", c_uint64),
        ("loss_scale", c_double),
        ("initial_loss_scale", c_double),
        ("loss_scale_window", c_int),
        ("min_loss_scale", c_double),
        ("max_skipped_steps", c_int),
        ("resume", c_int),
        ("slots", c_int),
        ("keep", c_int),
        ("resume_commit", c_uint64),
        ("fingerprint", c_uint64),
        ("log", LOG_FN),
        ("log_cookie", c_void_p),
        ("log_level", c_int),
        ("trace", c_void_p),
        ("device", c_void_p),
        ("stream", c_void_p),
        ("adam", c_int),
    ]


class GroupConfig(_Sized):
    _init = "zs_group_config_init"
    _fields_ = [
        ("size", c_size_t),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("decoupled", c_int),
    ]


class ParamConfig(_Sized):
    _init = "zs_param_config_init"
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("ndim", c_int),
        ("shape", POINTER(c_int64)),
        ("dtype", c_int),
        ("group", c_int32),
        ("frozen", c_int),
        ("grad_uses", c_int),
    ]


class StepConfig(_Sized):
    _init = "zs_step_config_init"
    _fields_ = [
        ("size", c_size_t),
        ("grad_scale", c_double),
        ("max_norm", c_double),
        ("clip_factor", c_double),
        ("found_inf", c_int),
    ]


class TierTraffic(ctypes.Structure):
    _fields_ = [("read_bytes", c_uint64), ("written_bytes", c_uint64), ("seconds", c_double)]


class StepInfo(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("step", c_uint64),
        ("skipped", c_int),
        ("grad_norm", c_double),
        ("clip_factor", c_double),
        ("loss_scale", c_double),
        ("seconds", c_double),
        ("adam_seconds", c_double),
        ("tier", TierTraffic * TIERS),
    ]


class MemoryRow(ctypes.Structure):
    _fields_ = [("tier", c_int), ("purpose", c_char * 40), ("bytes", c_uint64), ("peak", c_uint64)]


# Functions that return a status, with their arguments.
_CALLS = {
    "zs_pool_open": [c_int, c_int, POINTER(c_void_p)],
    "zs_trace_open": [c_char_p, c_size_t, POINTER(c_void_p)],
    "zs_trace_close": [POINTER(c_void_p)],
    "zs_comm_open_self": [POINTER(c_void_p)],
    "zs_comm_open_threads": [c_int, c_double, POINTER(c_void_p)],
    "zs_comm_open_mpi": [c_double, POINTER(c_void_p)],
    "zs_comm_open_callbacks": [POINTER(CommCallbacks), c_int, c_int, POINTER(c_void_p)],
    "zs_comm_all_reduce": [c_void_p, c_char_p, c_int, POINTER(c_double), c_size_t],
    "zs_engine_open": [POINTER(EngineConfig), c_void_p, POINTER(c_void_p)],
    "zs_engine_commit": [c_void_p],
    "zs_group_add": [c_void_p, POINTER(GroupConfig), POINTER(c_int32)],
    "zs_group_set": [c_void_p, c_int32, POINTER(GroupConfig)],
    "zs_param_add": [c_void_p, POINTER(ParamConfig), POINTER(c_int32)],
    "zs_unit_add": [c_void_p, c_char_p, POINTER(c_int32), c_size_t, POINTER(c_int32)],
    "zs_param_local": [c_void_p, c_int32, POINTER(c_uint64), POINTER(c_uint64)],
    "zs_param_owned": [c_void_p, c_int32, POINTER(c_uint64), POINTER(c_uint64)],
    "zs_param_write": [c_void_p, c_int32, c_uint64, c_uint64, c_int, c_void_p],
    "zs_param_write_moment": [c_void_p, c_int32, c_int, c_uint64, c_uint64, c_void_p],
    "zs_param_set_steps": [c_void_p, c_int32, c_uint64],
    "zs_param_get_steps": [c_void_p, c_int32, POINTER(c_uint64)],
    "zs_params_publish": [c_void_p],
    "zs_param_read": [c_void_p, c_int32, c_int, c_uint64, c_uint64, c_int, c_void_p],
    "zs_unit_acquire": [c_void_p, c_int32],
    "zs_unit_release": [c_void_p, c_int32],
    "zs_param_data": [c_void_p, c_int32, POINTER(c_void_p)],
    "zs_grad_begin": [c_void_p, c_int],
    "zs_grad_buffer": [c_void_p, c_int32, POINTER(c_void_p), POINTER(c_int)],
    "zs_grad_ready": [c_void_p, c_int32, c_void_p, c_int],
    "zs_grad_finish": [c_void_p],
    "zs_grad_discard": [c_void_p],
    "zs_grad_norm": [c_void_p, c_double, POINTER(c_double)],
    "zs_step": [c_void_p, POINTER(StepConfig), POINTER(StepInfo)],
    "zs_state_commit": [c_void_p, c_void_p, c_size_t],
    "zs_state_peek": [c_void_p, POINTER(c_int), c_void_p, POINTER(c_size_t)],
    "zs_state_resume": [c_void_p, POINTER(c_int), c_void_p, POINTER(c_size_t)],
    "zs_memory_report": [c_void_p, POINTER(MemoryRow), c_size_t, POINTER(c_size_t)],
    "zs_memory_note": [c_void_p, c_int, c_char_p, c_int64],
}
# The others: result, arguments.
_PLAIN = {
    "zs_last_error": (c_char_p, []),
    "zs_status_name": (c_char_p, [c_int]),
    "zs_version": (c_char_p, []),
    "zs_pool_close": (None, [POINTER(c_void_p)]),
    "zs_trace_now": (c_uint64, []),
    "zs_trace_span": (None, [c_void_p, c_int, c_char_p, c_char_p, c_uint64, c_uint64]),
    "zs_comm_close": (None, [POINTER(c_void_p)]),
    "zs_comm_rank": (c_int, [c_void_p]),
    "zs_comm_world": (c_int, [c_void_p]),
    "zs_comm_local_ranks": (c_int, [c_void_p]),
    "zs_comm_abort": (None, [c_void_p, c_char_p]),
    "zs_engine_config_init": (None, [POINTER(EngineConfig)]),
    "zs_engine_close": (None, [POINTER(c_void_p)]),
    "zs_engine_cancel": (None, [c_void_p]),
    "zs_group_config_init": (None, [POINTER(GroupConfig)]),
    "zs_param_config_init": (None, [POINTER(ParamConfig)]),
    "zs_step_config_init": (None, [POINTER(StepConfig)]),
    "zs_loss_scale": (c_double, [c_void_p]),
}


def _find():
    path = os.environ.get("ZSPILL_LIBRARY")
    if path:
        return path
    beside = os.path.join(os.path.dirname(__file__), "libzspill.so.0")
    if os.path.exists(beside):
        return beside
    return ctypes.util.find_library("zspill") or "libzspill.so.0"


def load(path=None):
    """The library at path; without one, that of ZSPILL_LIBRARY, of this package or of the system.
    Each call gives a handle of its own to what is loaded once."""
    path = path or _find()
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load libzspill ({error}): install it, or name it in ZSPILL_LIBRARY"
        ) from error

    def check(status, call, _args):
        if status != 0:
            raise ZspillError(
                call.__name__,
                status,
                lib.zs_status_name(status).decode(),
                lib.zs_last_error().decode(errors="replace"),
            )
        return status

    for name, arguments in _CALLS.items():
        call = getattr(lib, name)
        call.argtypes = arguments
        call.restype = c_int
        call.errcheck = check
    for name, (result, arguments) in _PLAIN.items():
        call = getattr(lib, name)
        call.argtypes = arguments
        call.restype = result
    return lib


class Collectives:
    """A zs_comm over the caller's own collectives.

    transport has all_gather(send) and all_to_all(send), which take a bytes-like object and return
    the bytes of all ranks in order (all_to_all: send is cut into world equal parts, part r goes to
    rank r), and barrier(). An exception in one of them becomes the error of the zs_ call that
    needed it. Keep the object alive as long as the communicator.
    """

    def __init__(self, lib, transport, rank, world):
        self._error = None
        self._lib = lib

        def guarded(body):
            def call(*args):
                try:
                    body(*args)
                    return 0
                except Exception as error:  # pylint: disable=broad-except
                    # Nothing may escape into C: there it would be lost and the call look good.
                    text = f"{type(error).__name__}: {error}".encode()
                    self._error = ctypes.create_string_buffer(text)
                    return 1

            return call

        def move(collective, factor_in):
            def body(_cookie, send, recv, count):
                size = count * factor_in
                data = collective((c_char * size).from_address(send) if size else b"")
                if len(data) != count * world:
                    raise ValueError(f"got {len(data)} bytes, not {count} from each of {world}")
                ctypes.memmove(recv, data, len(data))

            return MOVE_FN(guarded(body))

        def error_text(_cookie):
            return ctypes.addressof(self._error) if self._error is not None else None

        self._callbacks = CommCallbacks.default(
            lib,
            all_gather=move(transport.all_gather, 1),
            all_to_all=move(transport.all_to_all, world),
            barrier=BARRIER_FN(guarded(lambda _cookie: transport.barrier())),
            error=ERROR_FN(error_text),
        )
        self.comm = c_void_p()
        lib.zs_comm_open_callbacks(byref(self._callbacks), rank, world, byref(self.comm))

    def close(self):
        self._lib.zs_comm_close(byref(self.comm))
