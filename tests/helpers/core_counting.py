"""What a script begins with that counts the calls which the compiled core leaves to Python.

`goes_without_python(step)` runs `step` again and again, on all ranks, until one time nothing of
pycoll's is called but what is in the set `ALLOWED`: names of functions, and of modules. What
`before` does just before that is not counted.
"""

COUNTING = """
# Whatever is called of pycoll's in Python beyond the methods themselves is counted.
calls = []
peer = 1 - rank

def note(frame, event, arg):
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if event == "call" and module.startswith("pycoll.") and not {module, name} & ALLOWED:
        calls.append(f"{module}.{name}")

def goes_without_python(step, before=lambda: None):
    step()  # first uses import modules
    fewest = None
    for _ in range(30):  # a wait of more than a moment is Python's
        comm.barrier()
        before()
        calls.clear()
        sys.setprofile(note)
        step()
        sys.setprofile(None)
        fewest = calls[:] if fewest is None else min(fewest, calls[:], key=len)
    assert fewest == [], fewest
"""
