#!/usr/bin/env python3
"""Symbols carry the prefix.

    check_symbols.py ROOT LIBYARD.A LIBYARD.SO [HEADER...] | --self-test

libyard.a defines global names that start with yard_ only; libyard.so exports exactly the functions
that include/yard (or the named headers of it) declares with YARD_API (one that is declared and missing
is wrong, too)."""
import os
import re
import subprocess
import sys
import tempfile

from check_common import argument, command_of, report, self_test

LINKER_OWN = {"_init", "_fini", "_edata", "_end", "__bss_start", "_start"}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
DECLARATION = re.compile(r"\bYARD_API\b[^;{]*?\b(\w+)\s*\(")


def declared(headers):
    """Names of the functions that header texts declare with YARD_API."""
    return {m.group(1) for text in headers for m in DECLARATION.finditer(DIRECTIVE.sub(" ", COMMENT.sub(" ", text)))}


def symbols(path, *flags):
    out = subprocess.run(["nm", "--defined-only", "-P", *flags, path], capture_output=True, text=True,
                         check=True).stdout
    rows = (line.split() for line in out.splitlines())
    return sorted({r[0].split("@")[0] for r in rows if len(r) >= 2 and r[1].isalpha()})


def check_archive(path):
    return [f"{path}: defines {s}, want the prefix yard_" for s in symbols(path, "-g")
            if not s.startswith("yard_")]


def check_shared(path, names):
    exported = set(symbols(path, "-D")) - LINKER_OWN
    return ([f"{path}: exports {s}, which no public header declares" for s in sorted(exported - names)] +
            [f"{path}: does not export {s}, which a public header declares" for s in sorted(names - exported)])


def self_tests():
    header = """/* YARD_API void yard_in_a_comment(void); */
        #define YARD_API __attribute__((visibility("default")))
        #define YARD_LATER(x) \\
            YARD_API int x(void)
        YARD_API int yard_one(int x) __attribute__((const));
        YARD_API const char *yard_two(void);"""
    good = "int yard_one(int x); int yard_one(int x) { return x; }\n" \
           "const char *yard_two(void); const char *yard_two(void) { return \"\"; }\n"
    cc = command_of("CC", "cc", "gcc", "clang")
    names = declared([header])
    cases = [("declared names are found", [] if names == {"yard_one", "yard_two"} else [names], False)]
    with tempfile.TemporaryDirectory() as folder:
        def build(text, kind):
            source, out = os.path.join(folder, "x.c"), os.path.join(folder, "x." + kind)
            with open(source, "w", encoding="utf-8") as f:
                f.write(text)
            flags = ["-c"] if kind == "o" else ["-shared", "-fPIC"]
            subprocess.run(cc + flags + ["-o", out, source], check=True)
            return out
        for name, text, bad in [
                ("a good archive", good, False),
                ("a function without prefix", good + "int helper(void) { return 1; }\n", True),
                ("a variable without prefix", good + "int counter = 1;\n", True),
                ("a static one is free", good + "static int c; int *yard_c(void) { return &c; }\n", False)]:
            cases.append((name, check_archive(build(text, "o")), bad))
        for name, text, bad in [
                ("a good shared object", good, False),
                ("an export nobody declares", good + "int yard_three(void) { return 1; }\n", True),
                ("a hidden one is free",
                 good + "__attribute__((visibility(\"hidden\"))) int yard_three(void) { return 1; }\n", False),
                ("a declared one is missing", good.splitlines()[0], True)]:
            cases.append((name, check_shared(build(text, "so"), names), bad))
    self_test("symbols", cases)


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_tests()
    root, archive, shared = (argument(i) for i in (1, 2, 3))
    for library in (archive, shared):
        if not os.path.exists(library):
            sys.exit(f"{library}: no such library; build the target all first")
    folder = os.path.join(root, "include", "yard")
    texts = []
    for name in sys.argv[4:] or sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            texts.append(f.read())
    names = declared(texts)
    report("symbols", check_archive(archive) + check_shared(shared, names),
           len(names) and len(symbols(archive, "-g")))


main()
