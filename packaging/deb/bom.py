"""Lists the third-party software in the package: a CycloneDX bill of materials, and a part of
debian/copyright.

bom.py --packages SITE-PACKAGES --version VERSION --bom FILE --copyright FILE

debian/rules runs the script on the environment that environment.py has made, so that both files name what is
shipped. Names, versions and licences come from each wheel's metadata (core metadata, PEP 639). The script
appends its text to the copyright FILE, which exists already.
"""

import argparse
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

#: statically linked libraries of vgpu-hook and vgpu-runtime
STATIC = {"glibc": ("libc6-dev", "LGPL-2.1-or-later")}
#: libraries inside the wheels' compiled modules, which the wheels' metadata does not list
INSIDE = {"grpcio": ("BoringSSL", "OpenSSL AND ISC")}
_OWN = "vgpud"


@dataclass(frozen=True)
class Part:
    name: str
    version: str
    licence: str  # an SPDX expression, or the text of the wheel's metadata
    purl: str  # the package URL; empty if no package manager has the library


def licence_of(found: Distribution) -> str:
    """Returns the licence of a wheel from its metadata: the licence expression, otherwise the short text,
    otherwise the classifiers. Raises ValueError if the metadata has none of them.
    """
    words = next(iter(found.metadata.get_all("License-Expression") or ()), "")
    text = next(iter(found.metadata.get_all("License") or ()), "").strip()
    if not words and text and "\n" not in text:
        words = text
    if not words:
        classifiers = found.metadata.get_all("Classifier") or []
        named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::")]
        words = " AND ".join(named)
    if not words:
        raise ValueError(f"{found.name} {found.version} does not say its licence")
    return words


def bundled(packages: Path) -> Iterable[Part]:
    for found in sorted(distributions(path=[str(packages)]), key=lambda one: one.name.lower()):
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        if name == _OWN:
            continue
        yield Part(name, found.version, licence_of(found), f"pkg:pypi/{name}@{found.version}")
        if name in INSIDE:
            inner, licence = INSIDE[name]
            yield Part(inner, f"of {name} {found.version}", licence, "")


def linked() -> Iterable[Part]:
    for name, (package, licence) in STATIC.items():
        words = ["dpkg-query", "--show", "--showformat=${Version}", package]
        version = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        yield Part(name, version, licence, f"pkg:deb/debian/{package}@{version}")


def bom(parts: Iterable[Part], version: str) -> str:
    """Returns the bill of materials in CycloneDX 1.5. Its serial number is derived from the contents, so that
    the build is reproducible.
    """
    components = [
        {
            "type": "library",
            "name": part.name,
            "version": part.version,
            "licenses": [{"license": {"name": part.licence}}],
            **({"purl": part.purl, "bom-ref": part.purl} if part.purl else {}),
        }
        for part in parts
    ]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([version, components]))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": _OWN, "version": version}},
        "components": components,
    }
    return json.dumps(document, indent=2) + "\n"


def paragraph(parts: Iterable[Part]) -> str:
    """Returns the text for debian/copyright. The text has no Files paragraph, because such a paragraph would
    need the authors of each package.
    """
    lines = [f"  {part.name} ({part.version}): {part.licence}" for part in parts]
    return "\n".join(
        ["", "Comment:", " What the package vgpud has in it of others, with the licence of each:", *lines, ""]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the environment's site-packages")
    parser.add_argument("--version", required=True, help="of vgpud's package")
    parser.add_argument("--bom", type=Path, required=True, help="the file to write")
    parser.add_argument("--copyright", type=Path, required=True, help="debian/copyright, which is added to")
    options = parser.parse_args()
    parts = [*bundled(options.packages), *linked()]
    options.bom.parent.mkdir(parents=True, exist_ok=True)
    options.bom.write_text(bom(parts, options.version))
    options.copyright.write_text(options.copyright.read_text().rstrip("\n") + "\n" + paragraph(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
