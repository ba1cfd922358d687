"""What the check_*.py scripts share: the files of the tree, reporting, and the self-tests that prove
that a check can fail. Standard library only."""
import os
import shlex
import subprocess
import sys

SKIPPED_DIRS = {".git", ".venv", "__pycache__", ".cache"}
SKIP = 77  # ctest shows a test with this exit code as skipped


def is_build_folder(path):
    return (os.path.basename(path).startswith("build") or
            os.path.exists(os.path.join(path, "CMakeCache.txt")))


def tree_files(root):
    """Paths relative to root of all files that belong to the tree (build folders do not)."""
    for folder, dirs, files in os.walk(root):
        at_root = folder == root
        dirs[:] = sorted(d for d in dirs if d not in SKIPPED_DIRS
                         and not (at_root and is_build_folder(os.path.join(root, d))))
        for name in sorted(files):
            yield os.path.relpath(os.path.join(folder, name), root)


def read_text(path):
    """The file's text, or None when it is binary."""
    with open(path, "rb") as f:
        data = f.read()
    if b"\0" in data[:8192]:
        return None
    return data.decode("utf-8", errors="replace")


def command_of(variable, *fallbacks):
    """A compiler as a list of arguments: $variable, or the first fallback that runs; None without."""
    candidates = [os.environ[variable]] if os.environ.get(variable) else []
    for candidate in candidates + list(fallbacks):
        command = shlex.split(candidate)
        try:
            subprocess.run(command + ["--version"], capture_output=True, check=True)
            return command
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


def argument(i):
    """Argument i of the command line; without it the script's own text says how to use it."""
    if i >= len(sys.argv):
        sys.exit(sys.modules["__main__"].__doc__)
    return sys.argv[i]


def report(what, problems, n_checked):
    """Prints the problems and exits."""
    for p in problems:
        print(p)
    if n_checked == 0:
        problems = problems or ["nothing was checked"]
        print(f"{what}: nothing was checked")
    print(f"{what}: {n_checked} checked, {len(problems)} wrong")
    sys.exit(1 if problems else 0)


def self_test(what, cases):
    """cases: (name, problems found, whether there must be some)."""
    wrong = 0
    for name, problems, expected in cases:
        if bool(problems) != expected:
            wrong += 1
            print(f"{what}: '{name}' should {'fail' if expected else 'pass'}; found {problems}")
    print(f"{what} self-test: {len(cases)} cases, {wrong} wrong")
    sys.exit(1 if wrong or not cases else 0)
