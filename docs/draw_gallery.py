"""Draw every algorithm: the page docs/gallery.md and its pictures, docs/pictures/gallery/*.svg.

    python docs/draw_gallery.py            # writes them
    python docs/draw_gallery.py --check    # fails if one of them is not up to date

A picture is what `pycoll show` makes; the words are the first line of the algorithm's docstring.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pycoll
from pycoll.schedules import TABLE

SIZE = 4
DOCS = Path(__file__).resolve().parent
PAGE, PICTURES = DOCS / "gallery.md", DOCS / "pictures" / "gallery"

HEAD = f"""\
# Every algorithm, drawn

This page is made by `python docs/draw_gallery.py`, on {SIZE} ranks. For other numbers, and for
pages to step through, use `pycoll show`. [show.md](show.md) says what the pictures show, and
[algorithms.md](algorithms.md) how the algorithms work, what they cost, and when each is good.

P is the number of ranks, P' the largest power of two that is not above P, lg the logarithm to
base 2. "In rank order": operands stand in the order of the ranks, as operators need that are not
commutative. A barrier is an all_reduce or an all_gather of no bytes, and has its sentence.
"""


def files() -> dict[Path, str]:
    """All files of the gallery, with what is in them."""
    made: dict[Path, str] = {}
    page = [HEAD]
    for collective, named in TABLE.items():
        page += [f"## {collective}", ""]
        for name, algorithm in named.items():
            several = algorithm.hosts
            hosts = [rank * 2 // SIZE if several else 0 for rank in range(SIZE)]
            made[PICTURES / f"{collective}-{name}.svg"] = pycoll.show(
                collective, name, SIZE, hosts=hosts
            ).svg
            what = (algorithm.steps.__doc__ or "").strip().split("\n", 1)[0]
            on_hosts = " --hosts 2" if several else ""
            page += [
                f"### {collective} {name}",
                "",
                what,
                "",
                f"![{collective} {name}](pictures/gallery/{collective}-{name}.svg)",
                "",
                f"`pycoll show {collective} {name} -n {SIZE}{on_hosts}`",
                "",
            ]
    made[PAGE] = "\n".join(page)
    return made


def main(arguments: list[str]) -> int:
    """Write the files, or compare them."""
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    made = files()
    stale = [
        path
        for path, text in made.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    left = set(PICTURES.glob("*.svg")) - set(made)
    if arguments:
        for path in (*stale, *sorted(left)):
            print(f"{path} is not up to date: python docs/draw_gallery.py")
        return 1 if stale or left else 0
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
