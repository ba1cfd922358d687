#!/usr/bin/env python3
"""Headers compile alone: the public ones as C17 and C++17, the rooms' as C17.

    check_headers.py ROOT | --self-test        compilers: $CC, $CXX"""
import os
import subprocess
import sys
import tempfile

from check_common import argument, command_of, report, self_test, tree_files

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
LANGUAGES = {"c": ("CC", ("cc", "gcc", "clang"), ["-x", "c", "-std=c17", "-Wstrict-prototypes"]),
             "c++": ("CXX", ("c++", "g++", "clang++"), ["-x", "c++", "-std=c++17"])}
compilers = {}


def compiler(language):
    if language not in compilers:
        variable, fallbacks, flags = LANGUAGES[language]
        command = command_of(variable, *fallbacks)
        if command is None:
            print(f"headers: no {language} compiler; set ${variable}")
            sys.exit(1)
        compilers[language] = command + flags + WARNINGS + ["-fsyntax-only", "-"]
    return compilers[language]


def compile_alone(language, include, flags):
    """The compiler's complaints about including a header, twice."""
    text = f"#include {include}\n#include {include}\n"
    run = subprocess.run(compiler(language) + flags, input=text, capture_output=True, text=True)
    return [] if run.returncode == 0 else [f"{include} as {language}:\n{run.stderr.rstrip()}"]


def check_public(root, name):
    flags = ["-I", os.path.join(root, "include"), "-Wpedantic"]
    return [p for language in ("c", "c++") for p in compile_alone(language, f"<{name}>", flags)]


def check_room(root, name):
    flags = ["-I", os.path.join(root, "include"), "-I", os.path.join(root, "src"), "-D_GNU_SOURCE"]
    return compile_alone("c", f'"{name}"', flags)


def self_tests():
    good = "#ifndef G_H\n#define G_H\n#include <stdint.h>\nstatic inline int32_t f(int32_t x) { return x; }\n#endif\n"
    bad = {
        "a type from nowhere": "#ifndef A_H\n#define A_H\nuint32_t f(void);\n#endif\n",
        "no include guard": "struct twice { int x; };\n",
        "C only": "#ifndef C_H\n#define C_H\nstatic inline int *f(void *p) { return p; }\n#endif\n",
        "a warning": "#ifndef W_H\n#define W_H\nstatic inline int f(unsigned a, int b) { return a < b; }\n#endif\n",
    }
    with tempfile.TemporaryDirectory() as root:
        folder = os.path.join(root, "include", "yard")
        os.makedirs(folder)
        cases = []
        for name, text in [("good", good)] + list(bad.items()):
            with open(os.path.join(folder, "x.h"), "w", encoding="utf-8") as f:
                f.write(text)
            cases.append((name, check_public(root, "yard/x.h"), name != "good"))
    self_test("headers", cases)


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_tests()
    root = argument(1)
    problems, n = [], 0
    for path in tree_files(root):
        parts = path.split("/")
        if path.startswith("include/") and path.endswith(".h"):
            n += 1
            problems += check_public(root, path[len("include/"):])
        elif parts[0] == "src" and len(parts) == 3 and parts[2] == parts[1] + ".h":
            n += 1
            problems += check_room(root, path[len("src/"):])
    report("headers", problems, n)


main()
