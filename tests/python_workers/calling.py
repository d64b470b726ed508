"""A process that has its own subject judged: `calling.py PROGRAM FAULT WHEN OPTION…` starts `PROGRAM serve OPTION…`.

The exit code is the program's. FAULT `gone` ends this process between two runs, `killed` inside of one.
"""

import os
import subprocess
import sys

import mock


class Caller(mock.Worker):
    def run(self, sequence, body):
        if self.fault == "gone" and self.runs == 3:
            os._exit(9)
        super().run(sequence, body)

    def fail(self, sequence, problem):
        if self.fault == "killed" and self.runs == 3:
            os._exit(9)
        super().fail(sequence, problem)


# Nobody kills this process, so that it hangs for a while alone.
mock.HANG = 3
program, fault, when, *options = sys.argv[1:]
serving = subprocess.Popen([program, "serve", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
pipe = mock.Pipe(os.fdopen(os.dup(serving.stdout.fileno()), "rb"), serving.stdin)
try:
    Caller(fault, when, pipe=pipe).live()
except (SystemExit, BrokenPipeError):
    pass
serving.stdin.close()
sys.exit(serving.wait())
