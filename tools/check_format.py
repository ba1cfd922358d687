#!/usr/bin/env python3
"""Sources are formatted as .clang-format says.

    check_format.py ROOT [--fix] | --self-test

Versions of clang-format disagree in details, so one is the reference: 14. Another version is used
for `--fix`, with a warning, but the check is skipped then."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

from check_common import SKIP, argument, report, self_test, tree_files

REFERENCE = "14"
SOURCE = re.compile(r"^(src|include|tests|bench|tools)/.*\.(c|h|cu|cuh)$")


def find():
    """(path, major version) of the reference version if it is there, else of any."""
    found = []
    for name in ("clang-format-" + REFERENCE, "clang-format"):
        path = shutil.which(name)
        if path:
            out = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            m = re.search(r"version (\d+)\.", out)
            if m:
                found.append((path, m.group(1)))
    found.sort(key=lambda f: f[1] != REFERENCE)
    return found[0] if found else (None, None)


def complaints(tool, path, style):
    run = subprocess.run([tool, "--dry-run", "-Werror", f"--style=file:{style}", path],
                         capture_output=True, text=True)
    if run.returncode == 0:
        return []
    return [run.stderr.splitlines()[0] if run.stderr else f"{path}: not formatted"]


def self_tests(tool, root):
    style = os.path.join(root, ".clang-format")
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text, bad in [("good", "int f(int x)\n{\n    return x;\n}\n", False),
                                ("brace", "int f(int x) {\n    return x;\n}\n", True),
                                ("indent", "int f(int x)\n{\n  return x;\n}\n", True)]:
            path = os.path.join(folder, "x.c")
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
            cases.append((name, complaints(tool, path, style), bad))
    self_test("format", cases)


def main():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    tool, version = find()
    fix = "--fix" in sys.argv
    if tool is None:
        print("format: skipped, there is no clang-format (tools/deps.sh test installs it)")
        sys.exit(1 if fix else SKIP)
    if version != REFERENCE:
        print(f"format: this is clang-format {version}; the tree follows version {REFERENCE}, which may differ"
              + ("" if fix else ": skipped"))
        if not fix:
            sys.exit(SKIP)
    if "--self-test" in sys.argv:
        self_tests(tool, here)
    root = argument(1)
    paths = [os.path.join(root, p) for p in tree_files(root) if SOURCE.match(p)]
    if fix:
        for _ in range(2):  # a few rewrites are stable only after the second pass
            subprocess.run([tool, "-i"] + paths, check=True)
        print(f"format: {len(paths)} files")
        return
    style = os.path.join(root, ".clang-format")
    report("format", [c for p in paths for c in complaints(tool, p, style)], len(paths))


main()
