"""Writes the README's compatibility table from the matrix's result file: python3 ci/readme_tables.py .matrix/results.json"""

import json
import pathlib
import re
import sys

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"


def table(results):
    """Markdown: a row for each release, with its multi-process tests and the example's first and last loss."""
    lines = ["| Paddle | tests on four processes | skipped | example's loss, first and last step |", "|---|---|---|---|"]
    for row in results["results"]:
        if row["area"] != "fleet":
            continue
        losses = results["losses"].get(row["release"]) or []
        shown = f"{losses[0]:.6f}, {losses[-1]:.6f}" if losses else "none"
        outcome = f"{row['passed']} passed" + (f", {row['failed']} failed" if row["failed"] else "")
        lines.append(f"| {row['release']} | {outcome} | {row['skipped']} | {shown} |")
    pure = sum(row["passed"] for row in results["results"] if row["release"] == "any")
    lines.append(f"\nBeside these {pure} tests that need no Paddle. Python {results['python']}, {results['machine']}, CPU.")
    return "\n".join(lines)


def main(path):
    text = README.read_text()
    results = json.loads(pathlib.Path(path).read_text())
    new = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table(results)}\n{END}", text, flags=re.DOTALL)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
