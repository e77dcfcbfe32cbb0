"""Shows an answer with its gears: toast-decode --json --gear auto "Hello!" | python3 gears.py

[low], [mid] and [high] stand before the tokens that were read in them. A token is read after it has
been written, so what a gear costs shows in the words that follow. Under the answer: how many steps
ran in each, and how often the model shifted. Without --gear there is nothing to show but the text.
"""

import json
import signal
import sys

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when the reader goes away
last = None
for line in sys.stdin:
    try:
        step = json.loads(line)
    except ValueError:
        sys.exit("gears.py: this is no JSON: give toast-decode --json")
    if "end" not in step and step.get("gear") != last:
        last = step["gear"]
        print(f"[{last}]", end="")
    print(step["text"], end="", flush=True)
    if "end" in step:
        last = None
        print()
        if "gears" in step:
            ran = step["gears"]
            print(", ".join(f"{name} {ran[name]}" for name in ("low", "mid", "high", "shifts")))
