#!/usr/bin/env python3
"""No file names things outside the repository: a clone is all a user has.

    check_paths.py ROOT | --self-test"""
import os
import re
import sys

from check_common import argument, read_text, report, self_test, tree_files

# Written in pieces, so that this file passes its own check.
OUTSIDE = [
    (re.compile(r"\.\./" + "shared"), "a folder beside the repository"),
    (re.compile(r"(?<![\w.>])/" + "work/"), "a folder of one machine"),
    (re.compile(r"(?<![\w.])/" + r"(home/\w|root/\.?\w)"), "somebody's home folder"),
]


def check(path, text):
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, what in OUTSIDE:
            m = pattern.search(line)
            if m:
                problems.append(f"{path}:{number}: names {m.group(0)}, {what}")
    return problems


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test("paths", [
            ("plain", check("x", "see docs/architecture.md and /usr/lib"), False),
            ("a word that ends in work", check("x", "frame" + "work/x and net/frame" + "work/"), False),
            ("beside", check("x", "../" + "shared/DESIGN.md"), True),
            ("one machine", check("x", "cd /" + "work/main"), True),
            ("home", check("x", "cd /" + "home/me/src"), True),
        ])
    root = argument(1)
    problems, n = [], 0
    for path in tree_files(root):
        text = read_text(os.path.join(root, path))
        if text is not None:
            n += 1
            problems += check(path, text)
    report("paths", problems, n)


main()
