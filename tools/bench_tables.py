#!/usr/bin/env python3
"""Make the tables of docs/performance.md from the rows in bench/results/*.jsonl.

Between the markers

    <!-- bench:NAME KEY=VALUE .. -->
    <!-- /bench -->

goes a table of the rows whose "bench" is NAME and whose case (or row) has every KEY=VALUE, grouped
by device. Of rows that measure the same case on the same device the newest stays.

    tools/bench_tables.py            write the tables
    tools/bench_tables.py --check    exit 1 when a table is not what the rows say
    tools/bench_tables.py --self-test    that a check can fail
"""
import argparse
import json
import pathlib
import re
import sys
import tempfile

from check_common import self_test

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- bench:(\S+)((?: \S+=\S+)*) -->\n).*?(<!-- /bench -->)", re.S)
FIELDS = {"bench", "case", "p50_us", "p99_us", "min_us", "floor_us", "bytes", "flops", "verified",
          "device", "ranks", "commit", "date"}

# columns; a load on a server has no floor, but tails that matter
TIMES = {"work": {"p50_us": "median", "p99_us": "p99", "min_us": "min", "floor_us": "floor"},
         "load": {"p50_us": "median", "p90_us": "p90", "p99_us": "p99"}}


def read_rows(folder):
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                sys.exit(f"{path}:{number}: not JSON: {error}")
            missing = FIELDS - row.keys()
            if missing:
                sys.exit(f"{path}:{number}: without {', '.join(sorted(missing))}")
            rows.append(row)
    return rows


def newest(rows):
    """One row for each case, in the order of their first appearance."""
    latest = {}
    for row in rows:
        key = json.dumps([row["bench"], row["device"], row["ranks"], row["case"]], sort_keys=True)
        if key not in latest or row["date"] >= latest[key]["date"]:
            latest[key] = row
    return list(latest.values())


def matches(row, conditions):
    """device=WORD: the device's name holds the word; every other key has just that value."""
    return all(value in row["device"] if key == "device"
               else str(row["case"].get(key, row.get(key))) == value for key, value in conditions)


def duration(us):
    if us is None:
        return "-"
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.2f} ms"
    return f"{us:.1f} µs"


def rate(per_second):
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def cells_of(row, keys, times, with_share):
    case = row["case"]
    cells = [str(case.get(key, "-")) for key in keys]
    cells += [duration(row.get(name)) for name in times]
    if with_share:
        cells.append(f"{row['floor_us'] / row['p50_us']:.2f}" if row["floor_us"] else "-")
    if "tokens_per_s" in row:
        cells.append(rate(row["tokens_per_s"]))
    elif "tokens" in case:
        cells.append(rate(case["tokens"] * 1e6 / row["p50_us"]))
    elif row["bytes"] is not None:
        cells.append(f"{row['bytes'] / row['p50_us'] / 1e3:.1f} GB/s")
    else:
        cells.append("-")
    cells.append("yes" if row["verified"] else "**no**")
    return cells


def markdown(header, body):
    lines = [header, ["---"] * len(header), *body]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def table(rows):
    """Columns for what tells the rows apart; what they share is said once, above."""
    keys = list(dict.fromkeys(key for row in rows for key in row["case"] if key != "tokens"))
    if len({tuple(str(row["case"].get(key)) for key in keys) for row in rows}) < len(rows):
        keys.append("tokens")  # only the number of tokens tells some rows apart
    shared = [key for key in keys if len({str(row["case"].get(key)) for row in rows}) == 1]
    keys = [key for key in keys if key not in shared]
    with_share = any(row["floor_us"] for row in rows)
    times = TIMES["load" if any("tokens_per_s" in row for row in rows) else "work"]
    with_rate = any("tokens" in row["case"] or "tokens_per_s" in row for row in rows)
    header = keys + [*times.values(), *(["share"] if with_share else []),
                     "tokens/s" if with_rate else "rate", "verified"]
    about = [f"{key} {rows[0]['case'][key]}" for key in shared]
    ranks = sorted({row["ranks"] for row in rows})
    about.append(f"ranks {', '.join(map(str, ranks))}")
    about.append("commit " + ", ".join(sorted({row["commit"] for row in rows})))
    about.append(max(row["date"] for row in rows)[:10])
    return f"{'; '.join(about)}.\n\n" + markdown(header, [cells_of(row, keys, times, with_share) for row in rows])


def tables(rows, name, conditions):
    rows = [row for row in rows if row["bench"] == name and matches(row, conditions)]
    if not rows:
        return "\nNothing measured yet.\n\n"
    text = ""
    for device in dict.fromkeys(row["device"] for row in rows):
        text += f"\n**{device}**: " + table([row for row in rows if row["device"] == device])
    return text + "\n"


def fill(page, rows):
    """The page's text with its tables made anew."""
    text = page.read_text()
    if not BLOCK.search(text):
        sys.exit(f"{page}: no marker <!-- bench:NAME --> .. <!-- /bench -->")

    def table_of(block):
        conditions = [word.split("=", 1) for word in block[3].split()]
        return block[1] + tables(rows, block[2], conditions) + block[4]

    return BLOCK.sub(table_of, text)


def self_tests(page, rows):
    """A page as its rows say passes; one figure changed, or a row gone, does not."""
    text = fill(page, rows)
    figure = re.search(r"\| (\d+\.\d) µs \|", text)[1]
    with tempfile.TemporaryDirectory() as folder:
        def is_stale(text, rows):
            copy = pathlib.Path(folder) / "page.md"
            copy.write_text(text)
            return fill(copy, rows) != text

        self_test("tables", [("as it is", is_stale(text, rows), False),
                             ("a figure", is_stale(text.replace(figure, "0.0", 1), rows), True),
                             ("a row", is_stale(text, rows[1:]), True)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args()

    rows = newest(read_rows(args.results))
    if args.self_test:
        self_tests(args.page, rows)
    old, new = args.page.read_text(), fill(args.page, rows)
    if args.check and new != old:
        sys.exit(f"{args.page}: stale; run tools/bench_tables.py")
    if new != old:
        args.page.write_text(new)


if __name__ == "__main__":
    main()
