#!/usr/bin/env python3
"""Every block of docs/planner.md that follows a line `<!-- output of: COMMAND -->` is what COMMAND prints.

    planner_doc.py SWITCHYARD FILE [--fix]      COMMAND runs in bash, with switchyard on the path

Exit code 1 names the blocks that went stale; --fix writes them anew."""
import difflib
import os
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"(<!-- output of: (.+?) -->\n```text\n)(.*?)(```\n)", re.S)


def main():
    program, path = os.path.abspath(sys.argv[1]), sys.argv[2]
    fix = "--fix" in sys.argv
    with open(path, encoding="utf-8") as f:
        text = f.read()
    stale = 0
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(program, os.path.join(folder, "switchyard"))
        env = dict(os.environ, PATH=folder + ":" + os.environ["PATH"], LC_ALL="C")

        def run(m):
            nonlocal stale
            out = subprocess.run(["bash", "-c", "set -o pipefail; " + m.group(2)], env=env, text=True,
                                 capture_output=True)
            if out.returncode not in (0, 141):
                print(f"{path}: {m.group(2)}: exit code {out.returncode}: {out.stderr}")
                stale += 1
                return m.group(0)
            if out.stdout != m.group(3):
                stale += 1
                if not fix:
                    print(f"{path}: {m.group(2)}: the block is stale")
                    sys.stdout.writelines(difflib.unified_diff(m.group(3).splitlines(True),
                                                               out.stdout.splitlines(True), "document", "now", n=0))
            return m.group(1) + out.stdout + m.group(4)

        new = BLOCK.sub(run, text)
    n = len(BLOCK.findall(text))
    if fix:
        with open(path, "w", encoding="utf-8") as f:
            f.write(new)
    print(f"planner document: {n} blocks, {stale} {'written' if fix else 'wrong'}")
    sys.exit(1 if n == 0 or (stale and not fix) else 0)


main()
