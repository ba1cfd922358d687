#!/usr/bin/env python3
"""Relative links in Markdown files lead to files of the tree, and their anchors to headings.

    check_links.py ROOT | --self-test"""
import os
import re
import sys
import tempfile

from check_common import argument, report, self_test, tree_files

FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.M)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.M)


def anchors(text):
    """Anchors as GitHub makes them from headings."""
    out = set()
    for m in HEADING.finditer(FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", m.group(1).replace("`", "").lower()).replace(" ", "-")
        n, unique = 0, slug
        while unique in out:
            n += 1
            unique = f"{slug}-{n}"
        out.add(unique)
    return out


def check(root, path):
    problems = []
    with open(os.path.join(root, path), encoding="utf-8") as f:
        text = f.read()
    for m in LINK.finditer(CODE.sub("", FENCE.sub("", text))):
        target = m.group(1) or m.group(2)
        if re.match(r"[a-z][a-z0-9+.-]*:", target, re.I):
            continue
        file, _, anchor = target.partition("#")
        full = os.path.normpath(os.path.join(root, os.path.dirname(path), file)) if file \
            else os.path.join(root, path)
        inside = os.path.relpath(full, root)
        if inside.startswith(".."):
            problems.append(f"{path}: link {target} leaves the repository")
        elif not os.path.exists(full):
            problems.append(f"{path}: link {target} leads nowhere")
        elif anchor and full.endswith(".md"):
            with open(full, encoding="utf-8") as f:
                if anchor not in anchors(f.read()):
                    problems.append(f"{path}: link {target}: no such heading")
    return problems


def self_tests():
    cases = []
    with tempfile.TemporaryDirectory() as root:
        os.makedirs(os.path.join(root, "docs"))
        with open(os.path.join(root, "docs", "a.md"), "w", encoding="utf-8") as f:
            f.write("# A `title`, here\n")
        for name, text, bad in [
                ("file", "[a](docs/a.md)", False), ("heading", "[a](docs/a.md#a-title-here)", False),
                ("web", "[a](https://example.org/x)", False), ("in code", "`[a](gone.md)`", False),
                ("in a block", "```\n[a](gone.md)\n```\n", False), ("gone", "[a](docs/gone.md)", True),
                ("no heading", "[a](docs/a.md#other)", True), ("outside", "[a](../x.md)", True),
                ("reference", "[a]: docs/gone.md", True)]:
            with open(os.path.join(root, "x.md"), "w", encoding="utf-8") as f:
                f.write(text)
            cases.append((name, check(root, "x.md"), bad))
    self_test("links", cases)


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_tests()
    root = argument(1)
    paths = [p for p in tree_files(root) if p.endswith(".md")]
    report("links", [c for p in paths for c in check(root, p)], len(paths))


main()
