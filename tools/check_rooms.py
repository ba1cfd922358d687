#!/usr/bin/env python3
"""Rooms include only what they may.

    check_rooms.py ROOT | --self-test

src/<room>/ may include its own files, and of other rooms only their one header (src/R/R.h, or the
public ones in include/yard), and only of rooms below it:

    base <- fabric <- {ops, ep} <- model <- engine <- serve;  plan: model, base;  cli: all

CUDA headers belong to ops/cuda, ep/cuda and fabric (and to the tests of those). Includes that name no
room and no CUDA header are of no interest here."""
import os
import re
import sys

from check_common import argument, read_text, report, self_test, tree_files

BELOW = {
    "base": set(),
    "fabric": {"base"},
    "ops": {"base", "fabric"},
    "ep": {"base", "fabric"},
    "model": {"base", "fabric", "ops", "ep"},
    "engine": {"base", "fabric", "ops", "ep", "model"},
    "serve": {"base", "fabric", "ops", "ep", "model", "engine"},
    "plan": {"base", "model"},
    "cli": {"base", "fabric", "ops", "ep", "model", "engine", "serve", "plan"},
}
# public header -> its room
PUBLIC = {"status": "base", "types": "base", "ops": "ops", "fabric": "fabric", "ep": "ep", "engine": "engine", "plan": "plan"}
# Headers that a room shows beside its one header. Each is an exception with a reason.
# Row conversions are a part of base with a header of their own, and what its and ops' AVX2 files share.
ALSO_SHOWN = {"base/convert.h", "base/widen_avx2.h"}
CUDA_PLACES = re.compile(r"^(src|tests|bench)/((ops|ep)/cuda|fabric)/|^tests/gpu_test\.[ch]$")
CUDA_HEADER = re.compile(r"^(cuda|cublas|cudnn|cufft|curand|cusparse|nccl|nvshmem|nvml|nvrtc|nvtx|nvToolsExt"
                         r"|cooperative_groups|cutlass/|cute/|cub/|mma\.h)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.M)
SOURCE = re.compile(r"\.(c|h|cu|cuh|inc)$")


def room_of(path):
    parts = path.split("/")
    if parts[0] == "include":
        return PUBLIC.get(os.path.splitext(parts[-1])[0])
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def problem_of(path, room, quote, name):
    """Why the file at path may not include name, or None."""
    if CUDA_HEADER.match(name) and not CUDA_PLACES.match(path):
        return "CUDA headers belong to ops/cuda, ep/cuda and fabric"
    if room is None:
        return None
    if name.startswith("yard/"):
        other = PUBLIC.get(name[5:].removesuffix(".h"))
        if other is None:
            return "no room owns this public header; name its room in tools/check_rooms.py"
        if other != room and other not in BELOW[room]:
            return f"{room} may not use {other}"
        return None
    if quote != '"':
        return None
    if ".." in name.split("/"):
        return "includes are relative to src/"
    if "/" not in name or name.split("/")[0] not in BELOW:
        return None  # a file beside this one
    other = name.split("/")[0]
    if path.startswith("include/"):
        return "a public header includes public headers only"
    if other == room:
        return None
    if other not in BELOW[room]:
        return f"{room} may not use {other}"
    if name != f"{other}/{other}.h" and name not in ALSO_SHOWN:
        return f"of {other}, other rooms see {other}/{other}.h only"
    return None


def check(path, text):
    problems = []
    room = room_of(path)
    if path.startswith("src/") and room not in BELOW:
        problems.append(f"{path}: no room '{room}'; add it to tools/check_rooms.py")
        room = None
    if path.startswith("include/") and room is None:
        problems.append(f"{path}: no room owns this public header; name its room in tools/check_rooms.py")
    for m in INCLUDE.finditer(text):
        why = problem_of(path, room, m.group(1), m.group(2))
        if why:
            line = text.count("\n", 0, m.start()) + 1
            problems.append(f"{path}:{line}: includes {m.group(2)}: {why}")
    return problems


def self_tests():
    def case(path, include, bad):
        return (f"{path} includes {include}", check(path, f"/* x */\n  #  include {include}\n"), bad)

    self_test("rooms", [
        case("src/base/pool.c", '"base/base.h"', False),
        case("src/base/pool.c", "<yard/status.h>", False),
        case("src/base/pool.c", '"ops/ops.h"', True),
        case("src/base/base.h", "<yard/engine.h>", True),
        case("src/ops/cpu/linear.c", '"ops/cpu/cpu.h"', False),
        case("src/ops/cpu/linear.c", '"cpu.h"', False),
        case("src/ops/cpu/linear.c", '"model/model.h"', True),
        case("src/ops/cpu/linear.c", '"ep/ep.h"', True),
        case("src/ep/ring.c", '"ops/ops.h"', True),
        case("src/model/config.c", '"ops/ops.h"', False),
        case("src/model/config.c", '"ops/cpu/cpu.h"', True),
        case("src/model/config.c", '"../ops/ops.h"', True),
        case("src/model/config.c", '"engine/engine.h"', True),
        case("src/engine/step.c", '"model/model.h"', False),
        case("src/engine/step.c", '"model/config.h"', True),
        case("src/plan/roofline.c", '"model/model.h"', False),
        case("src/plan/roofline.c", '"engine/engine.h"', True),
        case("src/cli/main.c", '"engine/engine.h"', False),
        case("src/cli/main.c", '"model/tokenizer.h"', True),
        case("src/engine/step.c", "<cuda_runtime_api.h>", True),
        case("src/ops/cpu/linear.c", "<cuda_fp8.h>", True),
        case("src/ops/cuda/quantise.cu", "<cuda_runtime_api.h>", False),
        case("src/fabric/nvshmem.c", "<nvshmem.h>", False),
        case("tests/engine/step_test.c", '"engine/step.h"', False),
        case("tests/engine/step_test.c", "<cuda.h>", True),
        case("tests/ops/cuda/quantise_gpu_test.c", "<cuda.h>", False),
        case("include/yard/engine.h", "<yard/status.h>", False),
        case("include/yard/engine.h", '"base/base.h"', True),
        case("include/yard/nobody.h", "<stdint.h>", True),
        case("src/attic/x.c", "<stdint.h>", True),
    ])


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_tests()
    root = argument(1)
    problems, n = [], 0
    for path in tree_files(root):
        if SOURCE.search(path) and path.split("/")[0] in ("src", "include", "tests", "bench"):
            n += 1
            problems += check(path, read_text(os.path.join(root, path)) or "")
    report("rooms", problems, n)


main()
