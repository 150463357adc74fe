"""Text, SVG and pages: what they show is what the rounds are."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html import unescape

import pytest
from tiers import smoke

import pycoll
from pycoll._drawing.show import Drawing, show
from pycoll.schedule import Send
from pycoll.schedules import TABLE, schedule

ALL = [(collective, name) for collective, named in TABLE.items() for name in named]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(drawing.svg)


def sends(collective: str, name: str, size: int, hosts: list[int]) -> Counter[tuple[int, int]]:
    """How many messages go from whom to whom, by the schedules."""
    return Counter(
        (rank, step.peer)
        for rank in range(size)
        for step in schedule(collective, name, rank, size, 0, hosts).steps
        if isinstance(step, Send)
    )


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_every_arrow_is_a_message_of_the_schedule_and_every_message_an_arrow(
    collective: str, name: str
) -> None:
    for size in range(1, 10):
        hosts = [rank // 4 for rank in range(size)]
        drawing = show(collective, name, size, hosts=hosts)
        arrows: Counter[tuple[int, int]] = Counter()
        begins, ends = {}, {}
        for lane in drawn(drawing).iter(f"{SVG}g"):
            for path in lane.iter(f"{SVG}path"):
                if "data-from" in path.attrib:
                    sender, receiver = int(path.attrib["data-from"]), int(path.attrib["data-to"])
                    arrows[sender, receiver] += 1
                    numbers = re.findall(r"[\d.]+", path.attrib["d"])
                    begins.setdefault(sender, set()).add(float(numbers[0]))
                    ends.setdefault(receiver, set()).add(float(numbers[-2]))
        assert arrows == sends(collective, name, size, hosts)
        # Each rank has its column, where its arrows begin and end, in the order of ranks.
        columns = [begins.get(rank, set()) | ends.get(rank, set()) for rank in range(size)]
        places = [place for column in columns for place in column]
        assert places == sorted(set(places))
        assert len(places) in (size, 0)
        words = drawing.text
        assert len(re.findall(r"\b\d+>\d+(?![\d>])", words.split("\n\n", 1)[1])) >= sum(
            arrows.values()
        )
        assert "WRONG" not in words
        rounds = len(re.findall("^round ", words, re.M))
        if size in (1, 5):
            page = drawing.html
            assert page.count("<section>") == rounds + 1
            assert page.count("data-from") == sum(arrows.values())


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_all_words_are_inside_of_the_picture(collective: str, name: str) -> None:
    for size in (1, 3):
        picture = drawn(show(collective, name, size))
        for words in picture.iter(f"{SVG}text"):
            if "transform" not in words.attrib and "text-anchor" not in words.attrib:
                # A letter of a monospaced font is 0.6 of its size wide.
                wide = 0.6 * float(words.attrib["font-size"]) * len(words.text or "")
                end = float(words.attrib["x"]) + wide
                assert end <= float(picture.attrib["width"]), words.text


def cells(text: str, heading: str) -> list[list[str]]:
    """What the ranks hold below a heading, by chunk."""
    block = text.split(f"\n{heading}", 1)[1].split("\n\n", 1)[0].splitlines()
    return [line.split()[2:] for line in block if line.lstrip().startswith("chunk")]


@smoke
def test_the_text_of_a_ring_shows_both_phases() -> None:
    text = show("all_reduce", "ring", 3).text
    assert "4 rounds, 12 messages; the busiest rank sends or receives 1.33 S" in text
    assert cells(text, "start") == [["0..", ".1.", "..2"]] * 3
    assert "round 1, reduce_scatter begins\n  0>1 +2; 1>2 +0; 2>0 +1\n" in text
    assert cells(text, "round 1") == [
        ["0..", ".1.", "[.12]"],
        ["[0.2]", ".1.", "..2"],
        ["0..", "[01.]", "..2"],
    ]
    assert "round 3, all_gather begins\n  0>1 0; 1>2 1; 2>0 2\n" in text
    assert cells(text, "round 4") == [
        ["012", "012", "[012]"],
        ["[012]", "012", "012"],
        ["012", "[012]", "012"],
    ]


def test_many_ranks_have_ranges_in_place_of_digits() -> None:
    text = show("all_reduce", "recursive_doubling", 16).text
    assert cells(text, "round 2")[0] == [f"[{r // 4 * 4}-{r // 4 * 4 + 3}]" for r in range(16)]
    assert cells(text, "round 4")[0] == ["[all]"] * 16


def test_moved_blocks_are_named_by_whose_and_for_whom_they_are() -> None:
    assert cells(show("scatter", "linear", 3).text, "round 2")[2] == ["2", "-", "[2]"]
    assert cells(show("all_gather", "ring", 3).text, "round 2")[1] == ["[1]", "1", "1"]
    assert "from 1  [1>0]" in show("all_to_all", "linear", 2).text


def fills(picture: ElementTree.Element, name: str) -> int:
    """How many boxes are drawn with this class."""
    return sum(path.attrib["d"].count("M") for path in picture.iter(f"{SVG}path")
               if path.attrib.get("class") == name)  # fmt: skip


def test_chunks_fill_with_the_contributions_that_they_hold() -> None:
    picture = drawn(show("all_reduce", "recursive_doubling", 4))
    # One part each, then two, then four: so often is each rank's color there, and as its name.
    for rank in range(4):
        assert fills(picture, f"c{rank}") == 1 + 2 + 4
    assert fills(picture, "q") == 4 + 4
    moved = drawn(show("broadcast", "linear", 3))
    assert fills(moved, "c0") == 1 + 2 + 3
    assert fills(moved, "o") >= 2 + 1 + 0


def test_hosts_are_boxes() -> None:
    words = [e.text for e in drawn(show("barrier", "hierarchical", 6, hosts=[0, 0, 0, 1, 1, 2]))
             .iter(f"{SVG}text")]  # fmt: skip
    assert [word for word in words if word and word.startswith("host")] == [
        "host 0",
        "host 1",
        "host 2",
    ]
    assert "  | " in show("barrier", "hierarchical", 4, hosts=[0, 0, 1, 1]).text


def test_both_trees_of_a_double_tree_stand_side_by_side() -> None:
    circles = [e for e in drawn(show("all_reduce", "double_tree", 8)).iter(f"{SVG}circle")
               if e.attrib["r"] == "13"]  # fmt: skip
    assert len(circles) == 16
    first, second = circles[:8], circles[8:]
    assert max(float(c.attrib["cx"]) for c in first) < min(float(c.attrib["cx"]) for c in second)


def test_more_ranks_than_are_readable_have_messages_but_no_chunks() -> None:
    picture = drawn(show("all_reduce", "ring", 17))
    assert fills(picture, "q") == 0
    assert sum("data-from" in path.attrib for path in picture.iter(f"{SVG}path")) == 17 * 32
    assert "not the chunks" in "".join(picture.itertext())


def test_pages_need_no_network_and_are_well_formed() -> None:
    page = show("all_reduce", "double_tree", 8).html
    assert set(re.findall(r"https?://[^\"' )<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)|@import|\bsrc=|url\(", page)
    for section in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(section)


def test_a_notebook_shows_the_page_and_may_take_the_svg() -> None:
    drawing = pycoll.show("all_gather", "bruck", 4)
    framed = re.fullmatch(r'<iframe srcdoc="([^"]*)" .*></iframe>', drawing._repr_html_(), re.S)
    assert framed is not None
    assert unescape(framed[1]) == drawing.html
    assert drawing._repr_svg_() == drawing.svg
    assert str(drawing) == repr(drawing) == drawing.text.rstrip()
    assert drawing.fault is None


def test_arguments_that_make_no_sense_are_refused() -> None:
    for arguments, said in (
        (("all_reduce", "rng"), "has no algorithm 'rng'; it has ring, .*; did you mean ring[?]"),
        (("all_reduce", "shared_memory"), "sends no messages"),
        (("reduc", "ring"), "no collective 'reduc'; there are .*; did you mean reduce[?]"),
        (("all_reduce", "ring", 0), "size is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            show(*arguments)
    with pytest.raises(ValueError, match="root is 4"):
        show("reduce", "tree", 4, root=4)
    with pytest.raises(ValueError, match="all_reduce has no root"):
        show("all_reduce", "tree", 4, root=1)
    with pytest.raises(ValueError, match="a host for each of 4 ranks"):
        show("all_reduce", "tree", 4, hosts=[0, 0, 1])
    with pytest.raises(TypeError, match="size is an int"):
        show("all_reduce", "tree", 2.5)  # type: ignore[arg-type]


def test_nobody_who_does_not_draw_imports_what_draws() -> None:
    program = (
        "import sys, pycoll, pycoll.schedules, pycoll.simulate, pycoll._tools.cli\n"
        "with pycoll.init() as comm: comm.all_reduce(1)\n"
        "sys.exit(any('_drawing' in name for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
