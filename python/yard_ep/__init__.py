"""libyard-ep for PyTorch: dispatch and combine of expert parallelism on CUDA tensors.

Nothing is copied: the tensors' memory goes to the library, the kernels run on the current stream, so
a CUDA graph records them. Rank, size and meeting place come from the environment (`switchyard run`,
torchrun, mpirun, Slurm), the device is torch's current one. example.py beside this file is a program.

    group = yard_ep.Group(n_experts=256, top_k=8, hidden=7168, max_tokens=128)
    x, scale, count, index = group.dispatch(tokens, expert, weight, n_tokens)
    y = group.combine(experts(x, scale, count))

dispatch() is dispatch_send() and dispatch_recv(); call the halves to run something in between.
"""
import ctypes
import os

import torch

F32, BF16, FP8 = range(3)
EXPERT_MAJOR, FLAT, FLAT_IN_PLACE = range(3)
_DTYPES = {F32: torch.float32, BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}
_CUDA = 1
_P = ctypes.c_void_p


class _Config(ctypes.Structure):
    """yard_ep_config of yard/ep.h, field by field."""
    _fields_ = [("size", ctypes.c_size_t)] + [(n, ctypes.c_uint32) for n in (
        "n_experts", "top_k", "hidden", "max_tokens", "tp", "n_rounds", "row_align", "dispatch", "combine",
        "input", "output", "mode", "layout")] + [
            ("ue8m0", ctypes.c_bool), ("timeout_us", ctypes.c_uint64), ("fabric", _P), ("fabric_config", _P),
            ("node_copies", ctypes.c_bool), ("expert_y_in_place", ctypes.c_bool), ("heap_at", ctypes.c_uint64),
            ("device", ctypes.c_uint32), ("self_proving_tokens", ctypes.c_uint32), ("send_sms", ctypes.c_uint32)]


class _Capacity(ctypes.Structure):
    _fields_ = [("expert_x_rows", ctypes.c_uint64), ("expert_y_rows", ctypes.c_uint64),
                ("heap_bytes", ctypes.c_size_t)]


class _Error(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("message", ctypes.c_char * 512)]


class YardError(RuntimeError):
    """What the library says: which rank, what was wanted, what was found."""


def _load():
    lib = ctypes.CDLL(os.environ.get("YARD_EP_LIBRARY", "libyard-ep.so.1"))
    for name in ("get_round", "describe", "error", "expert_x"):
        getattr(lib, "yard_ep_" + name).restype = _P
    lib.yard_ep_get_round.argtypes = [_P, ctypes.c_uint32]
    for name, n in (("describe", 1), ("error", 1), ("destroy", 1), ("rank", 1), ("size", 1), ("poll", 1), ("expert_x", 3),
                    ("dispatch_send", 7), ("dispatch_recv", 6), ("combine_send", 3), ("combine_recv", 3)):
        getattr(lib, "yard_ep_" + name).argtypes = [_P] * n
    return lib


def _address(tensor, dtype, what):
    if tensor is None:
        return None
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.dtype != dtype:
        raise ValueError(f"{what}: want a contiguous CUDA tensor of {dtype}, got {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


class _Memory:
    """Memory of the library, rows a pitch apart, as torch.as_tensor() takes it."""

    def __init__(self, address, rows, cols, pitch_bytes, typestr):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (rows, cols), "typestr": typestr,
                                         "strides": (pitch_bytes, int(typestr[2:])), "version": 3}


class Group:
    """A group of ranks, one a process and GPU. settings: fields of yard_ep_config. Collective."""

    def __init__(self, **settings):
        self._lib, self._ep, err = _load(), _P(), _Error()
        self.config = c = _Config(size=ctypes.sizeof(_Config), tp=1, n_rounds=1, row_align=1, dispatch=FP8,
                                  combine=BF16, input=BF16, output=BF16, timeout_us=5000000, device=_CUDA,
                                  self_proving_tokens=128)
        for name, value in settings.items():
            if not hasattr(c, name):
                raise ValueError(f"yard_ep_config has no field {name}")
            setattr(c, name, value)
        torch.cuda.current_stream()  # makes the context of the device that the group will belong to
        if self._lib.yard_ep_create(ctypes.byref(self._ep), ctypes.byref(c), ctypes.byref(err)):
            raise YardError(err.message.decode())
        self.rank, self.size = self._lib.yard_ep_rank(self._ep), self._lib.yard_ep_size(self._ep)
        room = _Capacity()
        self._lib.yard_ep_capacity_of(ctypes.byref(c), self.size, ctypes.byref(room), ctypes.byref(err))
        self.expert_x_rows, self.expert_y_rows = room.expert_x_rows, room.expert_y_rows

    def __str__(self):
        return ctypes.string_at(self._lib.yard_ep_describe(self._ep)).decode()

    def close(self):
        """Waits for the group's kernels and gives everything back."""
        self._lib.yard_ep_destroy(self._ep)
        self._ep = _P()

    def poll(self):
        """Raises YardError once a peer is lost, a deadline has passed or an input was bad."""
        self._check(self._lib.yard_ep_poll(self._ep))

    def _check(self, status):
        if status:
            raise YardError(ctypes.string_at(self._lib.yard_ep_error(self._ep)).decode())

    def _call(self, name, round_idx, *args):
        self._check(getattr(self._lib, "yard_ep_" + name)(
            self._lib.yard_ep_get_round(self._ep, round_idx), *args, torch.cuda.current_stream().cuda_stream))

    def dispatch_send(self, x, expert, weight, n_tokens, x_scale=None, round_idx=0):
        """x [max_tokens, hidden], expert and weight [max_tokens, top_k] int32 and float32, n_tokens [1] int32."""
        self._call("dispatch_send", round_idx, _address(x, _DTYPES[self.config.input], "x"),
                   _address(x_scale, torch.float32, "x_scale"), _address(expert, torch.int32, "expert"),
                   _address(weight, torch.float32, "weight"), _address(n_tokens, torch.int32, "n_tokens"))

    def dispatch_recv(self, round_idx=0):
        """(expert_x, expert_x_scale or None, expert_count, row_index), new tensors, as in yard/ep.h; with
        layout=FLAT_IN_PLACE the first two are the library's memory, to be read before combine_send."""
        c, device = self.config, torch.device("cuda", torch.cuda.current_device())
        count = torch.empty(c.n_experts // self.size, dtype=torch.int32, device=device)
        index = torch.empty(self.expert_y_rows, dtype=torch.int32, device=device)
        if c.layout == FLAT_IN_PLACE:
            self._call("dispatch_recv", round_idx, None, None, count.data_ptr(), index.data_ptr())
            return *self._expert_x(round_idx, device), count, index
        x = torch.empty((self.expert_x_rows, c.hidden), dtype=_DTYPES[c.dispatch], device=device)
        scale = None
        if c.dispatch == FP8:
            scale = torch.empty((self.expert_x_rows, (c.hidden + 127) // 128), device=device)
        self._call("dispatch_recv", round_idx, x.data_ptr(), scale.data_ptr() if scale is not None else None,
                   count.data_ptr(), index.data_ptr())
        return x, scale, count, index

    def _expert_x(self, round_idx, device):
        """(expert_x, expert_x_scale or None) where rows landed: read them before this round's combine_send."""
        c, pitch, scale_at, rows = self.config, ctypes.c_size_t(), ctypes.c_size_t(), self.expert_x_rows
        base = self._lib.yard_ep_expert_x(self._lib.yard_ep_get_round(self._ep, round_idx), ctypes.byref(pitch),
                                          ctypes.byref(scale_at))
        dtype, scale = _DTYPES[c.dispatch], None
        x = torch.as_tensor(_Memory(base, rows, c.hidden * dtype.itemsize, pitch.value, "|u1"), device=device)
        if c.dispatch == FP8:
            scale = torch.as_tensor(_Memory(base + scale_at.value, rows, (c.hidden + 127) // 128, pitch.value, "<f4"),
                                    device=device)
        return x.view(dtype), scale

    def combine_send(self, expert_y, round_idx=0):
        """expert_y [expert_y_rows, hidden] of config.combine, numbered as expert-major rows."""
        self._call("combine_send", round_idx, _address(expert_y, _DTYPES[self.config.combine], "expert_y"))

    def combine_recv(self, round_idx=0):
        """y [max_tokens, hidden] of config.output, a new tensor; rows from n_tokens on are not written."""
        c = self.config
        y = torch.empty((c.max_tokens, c.hidden), dtype=_DTYPES[c.output], device=torch.cuda.current_device())
        self._call("combine_recv", round_idx, y.data_ptr())
        return y

    def dispatch(self, x, expert, weight, n_tokens, x_scale=None, round_idx=0):
        self.dispatch_send(x, expert, weight, n_tokens, x_scale, round_idx)
        return self.dispatch_recv(round_idx)

    def combine(self, expert_y, round_idx=0):
        self.combine_send(expert_y, round_idx)
        return self.combine_recv(round_idx)
