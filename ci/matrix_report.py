"""The end of matrix.sh: pytest's reports as one result file and one table.

    python3 ci/matrix_report.py FOLDER "RELEASES" "PURE AREAS" [REPORT]

Reads FOLDER/reports/<release>/<area>.xml, writes FOLDER/results.json. REPORT is that of a run of all tests, taken for the
pure areas and the last release. Exits with 1 if a test failed, if tests that should have run have not, or if the
example's losses differ between releases.
"""

import json
import pathlib
import platform
import sys
import xml.etree.ElementTree as ElementTree

SAME_LOSS = 1e-6  # relative


def read_report(path, release, area):
    """(a row of the result file, the losses that a test has recorded or None), of the area's tests in a report."""
    row = {"release": release, "area": area, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {**row, "failed": 1, "note": "did not run to its end"}, None
    losses = None
    for case in cases:
        if not case.get("classname").startswith(f"tests.{area}."):
            continue
        tags = {child.tag for child in case}
        row["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
        row["seconds"] = round(row["seconds"] + float(case.get("time")), 1)
        for one in case.iter("property"):
            losses = json.loads(one.get("value")) if one.get("name") == "losses" else losses
    if row["passed"] + row["failed"] == 0:
        row.update(failed=1, note="no test ran")
    return row, losses


def compare_losses(losses):
    """A row that says whether the example's losses are the same on all releases."""
    row = {"release": "all", "area": "same losses", "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
    known = [of_one for of_one in losses.values() if of_one]
    if len(known) < len(losses) or len({len(of_one) for of_one in known}) != 1:
        return {**row, "failed": 1, "note": "losses are missing"}
    difference = max(abs(max(step) - min(step)) / abs(max(step)) for step in zip(*known))
    row["passed" if difference <= SAME_LOSS else "failed"] = 1
    return {**row, "note": f"largest relative difference {difference:.1e}"}


def table(rows):
    cells = [["Paddle", "area", "passed", "failed", "skipped", "seconds", ""]]
    cells += [[str(row.get(key, "")) for key in ("release", "area", "passed", "failed", "skipped", "seconds", "note")] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def main(folder, releases, pure, tested=None):
    folder, releases = pathlib.Path(folder), releases.split()
    rows, losses = [], {}
    for area in pure.split():
        rows.append(read_report(tested or folder / "reports/any" / f"{area}.xml", "any", area)[0])
    for release in releases:
        report = folder / "reports" / release / "fleet.xml"
        row, losses[release] = read_report(tested if tested and release == releases[-1] else report, release, "fleet")
        rows.append(row)
    if len(releases) > 1:
        rows.append(compare_losses(losses))
    results = {"python": platform.python_version(), "machine": platform.machine(), "results": rows, "losses": losses}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    passed, failed = (sum(row[key] for row in rows) for key in ("passed", "failed"))
    print(f"\n{table(rows)}\n\n{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
