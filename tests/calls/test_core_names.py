"""Names that are made while the program runs, and names of what a program cannot make."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts

PROGRAM = """
import functools

x, out = np.arange(1000.0), np.zeros(1000)
for op, keyword in (
    ("sum", "out"),
    ("".join(["su", "m"]), "out"),
    ("max", "".join(["ou", "t"])),
    (str(np.str_("prod")), "out"),
):
    calls = []

    def see(frame, event, arg):
        if event == "call":
            calls.append(frame.f_code.co_name)

    call = functools.partial(comm.all_reduce, x, op, **{keyword: out})
    call()
    sys.setprofile(see)
    call()
    sys.setprofile(None)
    assert (out == {"s": 2 * x, "m": x, "p": x * x}[op[0]]).all()
    # The core calls Python only in a long wait, and for what it leaves to it: by that name.
    assert "all_reduce" not in calls, (op, keyword, calls)
ok()
"""


def test_a_name_made_at_run_time_takes_the_way_of_one_that_stands_in_the_program(
    scripts: Scripts,
) -> None:
    scripts(2, PROGRAM)


@pytest.mark.parametrize("name", ["Started", "Request", "Both", "Collective", "Send", "Receive"])
def test_what_only_calls_make_is_not_made_by_hand(name: str) -> None:
    core = pytest.importorskip("pycoll._transports._core", exc_type=ImportError)
    with pytest.raises(TypeError, match="cannot create"):
        getattr(core, name)()
