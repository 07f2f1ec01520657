"""Whether an sdist and a wheel have in them what they should, and nothing else: python3 ci/check_dist.py FOLDER

The measure is what Git knows, or without Git (in an unpacked sdist) what lies in the folders.
"""

import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE, PTH = "paddle_vpp_ext", "paddle_vpp_ext.pth"
NOT_IN_THE_WHEEL = (f"{PACKAGE}/examples/pictures/", f"{PACKAGE}/{PTH}")  # the README's; the .pth lies at the wheel's root


def sources():
    """The project's files, as paths from its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    folders = (ROOT / name for name in (PACKAGE, "tests", "ci", ".ci"))
    found = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if "__pycache__" not in name} | {"README.md", "CHANGELOG.md", "LICENSE", "setup.py", "pyproject.toml"}


def faults_of_sdist(names, expected):
    """``names`` without the leading folder."""
    yield from (f"the sdist lacks {name}: see MANIFEST.in" for name in sorted(expected - names))
    made = {"PKG-INFO", "setup.cfg"}
    extra = {name for name in names - expected - made if not name.startswith(f"{PACKAGE}.egg-info/")}
    yield from (f"the sdist has {name}, which is not the project's: see MANIFEST.in" for name in sorted(extra))


def faults_of_wheel(names, expected):
    code = {name for name in expected if name.startswith(f"{PACKAGE}/") and not name.startswith(NOT_IN_THE_WHEEL)}
    found = {name for name in names if ".dist-info/" not in name}
    yield from (
        f"the wheel lacks {name}: a folder without __init__.py, or see package-data in pyproject.toml" for name in sorted(code - found)
    )
    yield from (f"the wheel has {name}, which does not belong there" for name in sorted(found - code - {PTH}))
    lines = [name for name in names if name.endswith(".pth")]
    if lines != [PTH]:
        yield f"the wheel has to have {PTH} once, at its root, and has {lines or 'none'}: see BuildWithActivation in setup.py"


def faults_of_metadata(text, readme):
    """Of the wheel's METADATA, against the one place of the version and what an index can show."""
    version = re.search(r'^__version__ = "(.+)"', (ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
    fields, _, page = text.partition("\n\n")
    for line in (
        f"Version: {version}",
        "License-Expression: Apache-2.0",
        "Description-Content-Type: text/markdown",
        "Classifier: Typing :: Typed",
    ):
        if line not in fields.splitlines():
            yield f"the metadata lacks the line {line!r}"
    for target in re.findall(r"\]\(((?!https?:|#)[^)]*)\)", page):
        yield f"the index's page refers to {target}, which an index does not have: see readme_for_an_index in setup.py"
    if not set(re.findall(r"^## .*", readme, re.MULTILINE)) <= set(page.splitlines()):
        yield "the index's page lacks sections of README.md"


def main(folder):
    (sdist,), (wheel,) = pathlib.Path(folder).glob("*.tar.gz"), pathlib.Path(folder).glob("*.whl")
    expected = sources()
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in in_wheel if name.endswith(".dist-info/METADATA"))
    faults = [
        *faults_of_sdist(in_sdist, expected),
        *faults_of_wheel(in_wheel, expected),
        *faults_of_metadata(metadata, (ROOT / "README.md").read_text(encoding="utf-8")),
    ]
    print(*faults, sep="\n", file=sys.stderr) if faults else print(
        f"{sdist.name}: {len(in_sdist)} files; {wheel.name}: {len(in_wheel)} files"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
