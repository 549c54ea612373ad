"""Print the licences of the JavaScript packages in `attnmix/page/bundle.js`, for `attnmix/page/licences.txt`.

    npm run build && python -m tools.licences > attnmix/page/licences.txt    # `make bundle`

esbuild lists the bundled files in `node_modules/bundle.json`. A licence text that several packages share is printed
once.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

METAFILE = Path("node_modules/bundle.json")
PACKAGE = re.compile(r"(.*node_modules/(?:@[^/]+/)?[^/]+)/")
COPYRIGHT = re.compile(r"^Copyright .*\n+", re.MULTILINE)


def bundled_packages(metafile: Path) -> set[Path]:
    """Return the folders of the packages with code in the bundle, from the `metafile` of esbuild."""
    (output,) = json.loads(metafile.read_text(encoding="utf-8"))["outputs"].values()
    folders = set()
    for file, part in output["inputs"].items():
        match = PACKAGE.match(file)
        if match and part["bytesInOutput"]:
            folders.add(Path(match[1]))
    return folders


def read_licence(package: Path) -> str:
    """Return the licence text of a package; raise `FileNotFoundError` if it has none."""
    for file in sorted(package.iterdir()):
        if file.name.upper().startswith("LICEN"):
            return "\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()).strip() + "\n"
    raise FileNotFoundError(f"{package}: no licence file")


def format_licences(texts: dict[str, str]) -> str:
    """Return the licence texts of all packages (`texts`, by package) as one text.

    A licence text shared by several packages is listed once, below the names of these packages. Licence texts that
    differ only in their copyright line count as equal; their copyright lines are listed with the names.
    """
    owners = defaultdict(lambda: defaultdict(set))  # names of packages by licence text and copyright line
    for name, text in texts.items():
        copyrights = COPYRIGHT.findall(text)
        body = text
        copyright_line = ""
        if len(copyrights) == 1:
            body = COPYRIGHT.sub("", text)
            copyright_line = copyrights[0].strip()
        owners[body][copyright_line].add(name)
    blocks = ["Licences of the JavaScript packages in this bundle\n"]
    for body, names_by_copyright in owners.items():
        heads = []
        for copyright_line, names in sorted(names_by_copyright.items()):
            heads.append(f"{', '.join(sorted(names))}\n{copyright_line}".strip() + "\n")
        blocks.append("\n".join(heads) + "\n" + body)
    return f"\n{'=' * 80}\n\n".join(blocks)


def main() -> None:
    """Print the licences of the bundled packages."""
    texts = {}
    for package in sorted(bundled_packages(METAFILE)):
        manifest = json.loads((package / "package.json").read_text(encoding="utf-8"))
        texts[f"{manifest['name']} {manifest['version']}"] = read_licence(package)
    print(format_licences(texts), end="")


if __name__ == "__main__":
    main()
