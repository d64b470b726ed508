"""`python -m seamproof.script --leashed --limit SECONDS -- CASE.json`: a script that shows nothing, from the case's numbers.

The variable SCRIPT says what goes wrong with it: `doubt`, `hang`, `fail` or `none`.
"""

import json
import os
import subprocess
import sys
import time

how, case = os.environ.get("SCRIPT"), sys.argv[-1]
if how == "hang":
    subprocess.Popen(["sleep", "600"])
    with open("begun", "w"):
        time.sleep(600)
if how == "fail":
    sys.exit("no such library")
if how == "none":
    print(json.dumps({"written": False, "shows": False, "doubt": "there is none: no source"}))
    sys.exit()
said = subprocess.run([os.environ["SEAMPROOF"], "inputs", case], capture_output=True, check=True).stdout
words, _, frames = said.partition(b"\n")
assert frames.startswith(b"SMP") and frames.count(b"SMP") == 2 and json.loads(words)["problem"]
with open(case.removesuffix("json") + "py", "w") as file:
    file.write("raise SystemExit(1)\n")
# More than a pipe holds.
print(" " * 200_000)
doubt = "it holds" if how == "doubt" else None
print(json.dumps({"written": True, "shows": doubt is None, "doubt": doubt}))
