"""A worker in plain Python for the tests: attention on lists of floats, right and small, with failures on demand.

It speaks the protocol of docs/protocol.md and uses the standard library alone. Run it as `mock.py [FAULT [WHEN]]`; FAULTS
names the faults. WHEN is `always`, `others` (every run but the sentinel), `softcap` (the runs whose problem has one), the
number of a run of the process, or `once:SEED` (the first run of all processes with that data seed). A third argument is a
folder, by which a test tells its processes.
"""

import array
import faulthandler
import json
import math
import os
import signal
import struct
import sys
import time
import zlib

MAGIC = b"SMP"
VERSION = 3
OPEN, RUN, READY, PHASE, OUTPUTS, FAILED = 1, 2, 3, 4, 5, 6
RECEIVED, UPLOADED, COMPILING, LAUNCHED, DONE = range(5)
UNWRITTEN = struct.pack("<I", 0x7FE5EA11)
SENTINEL_SEED = 0x5E171E1D
# Seconds for which a worker hangs.
HANG = 600

DECLARATION = {
    "table": {
        "precisions": [
            {
                "q": "bf16", "k": "bf16", "v": "bf16", "p": "f32",
                "out": "bf16", "dout": "bf16", "ds": "bf16", "gradients": "bf16",
            }
        ],
        "dims": {"qk": {"from": 1, "to": 8}, "v": {"from": 1, "to": 8}},
        "heads": {"groups": {"from": 1, "to": 4}, "most": 4},
        "lengths": {"most": 24, "sequences_most": 4, "rows_most": 128},
        "softcap": True,
        "sinks": ["none", "off-by-one", "learnable"],
        "statistics": ["lse", "max_logit"],
    },
    "padding": {"inputs": "anything", "outputs": "untouched"},
    "promises": {
        "deterministic_backward": True, "sequences_alone": True, "heads_alone": True,
        "groups_alone": True, "rows_alone": True,
    },
    "start_seconds": 30,
}
# A declaration without limits of size, for measurements.
LARGE = {**DECLARATION, "table": {"precisions": DECLARATION["table"]["precisions"], "statistics": ["lse", "max_logit"]}}


# --- frames -----------------------------------------------------------------------------------------------------------


def frame(kind, sequence, body, version=VERSION):
    head = MAGIC + bytes([version, kind, 0, 0, 0]) + struct.pack("<QQ", sequence, len(body))
    return head, body, struct.pack("<I", zlib.crc32(body, zlib.crc32(head)))


class Pipe:
    """The two ends of the pipes, taken away from everything that prints or reads."""

    def __init__(self, requests, answers):
        self.requests, self.answers = requests, answers

    @classmethod
    def own(cls):
        pipe = cls(os.fdopen(os.dup(0), "rb", buffering=1 << 20), os.fdopen(os.dup(1), "wb", buffering=0))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        return pipe

    def exactly(self, count):
        got = self.requests.read(count)
        if len(got) < count:
            sys.exit(0)
        return got

    def read(self):
        head = self.exactly(24)
        if head[:3] != MAGIC or head[3] != VERSION:
            sys.exit(f"no frame of version {VERSION}: {head[:8]!r}")
        sequence, length = struct.unpack("<QQ", head[8:24])
        body = self.exactly(length)
        if struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) != self.exactly(4):
            sys.exit("the frame's digest is wrong")
        return head[4], sequence, body

    def raw(self, data):
        view = memoryview(data)
        while view:
            view = view[self.answers.write(view):]

    def write(self, kind, sequence, body, version=VERSION):
        parts = frame(kind, sequence, body, version)
        for part in [b"".join(parts)] if len(body) <= 1 << 16 else parts:
            self.raw(part)

    def say(self, kind, sequence, value, version=VERSION):
        self.write(kind, sequence, json.dumps(value).encode(), version)

    def phase(self, sequence, phase, costs=None):
        self.write(PHASE, sequence, bytes([phase]) + (json.dumps(costs).encode() if costs else b""))


# --- attention --------------------------------------------------------------------------------------------------------


def bf16(value):
    """A number rounded to bf16, to the nearest, ties to even."""
    try:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    if bits & 0x7F800000 != 0x7F800000:
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Tensor:
    """A tensor [rows, heads, dim] of f32."""

    def __init__(self, rows, heads, dim, data=None):
        self.shape = [rows, heads, dim]
        self.data = data if data is not None else array.array("f", UNWRITTEN * (rows * heads * dim))

    def row(self, row, head):
        _, heads, dim = self.shape
        start = (row * heads + head) * dim
        return self.data[start:start + dim]

    def put(self, row, head, values):
        _, heads, dim = self.shape
        start = (row * heads + head) * dim
        self.data[start:start + dim] = array.array("f", values)


def inputs(problem, body):
    heads, dims, rows = problem["heads"], problem["dims"], problem["rows"]
    backward = problem["pass"] == "backward"
    shapes = [
        (rows["q"], heads["q"], dims["qk"]),
        (rows["kv"], heads["kv"], dims["qk"]),
        (rows["kv"], heads["kv"], dims["v"]),
        (rows["q"] if backward else 0, heads["q"], dims["v"]),
    ]
    at, tensors = 0, []
    for shape in shapes:
        size = 4 * shape[0] * shape[1] * shape[2]
        data = array.array("f")
        data.frombytes(body[at:at + size])
        tensors.append(Tensor(*shape, data))
        at += size
    sink = array.array("f")
    sink.frombytes(body[at:])
    return (*tensors, sink)


def rows_of(run):
    return [run["offset"] + i * run.get("step", 1) for i in range(run["len"])]


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


class Attention:
    """One problem: the forward, and the gradients at the out and lse that it returns."""

    def __init__(self, problem, tensors):
        self.problem = problem
        self.q, self.k, self.v, self.dout, self.sink = tensors
        heads, dims, rows = problem["heads"], problem["dims"], problem["rows"]
        self.group = heads["q"] // heads["kv"]
        # They are f32 numbers, written with no more digits than it takes to tell them from others.
        self.scale = f32(problem["softmax"]["scale"])
        self.softcap = problem["softmax"].get("softcap") and f32(problem["softmax"]["softcap"])
        self.out = Tensor(rows["q"], heads["q"], dims["v"])
        self.lse = Tensor(heads["q"], rows["q"], 1)
        self.max_logit = [-math.inf] * heads["q"]
        self.learnable = problem["softmax"].get("sink", "none") == "learnable"
        self.backward = problem["pass"] == "backward"
        if self.backward:
            self.dq = Tensor(rows["q"], heads["q"], dims["qk"])
            self.dk = Tensor(rows["kv"], heads["kv"], dims["qk"])
            self.dv = Tensor(rows["kv"], heads["kv"], dims["v"])
            self.dsink = [0.0] * (heads["q"] if self.learnable else 0)

    def sink_of(self, head):
        kind = self.problem["softmax"].get("sink", "none")
        return {"none": None, "off-by-one": 0.0}.get(kind, self.sink[head] if self.learnable else None)

    def sees(self, i, j, lq, lk):
        mask = self.problem["mask"]
        shift = lk - lq if mask["align"] == "bottom-right" else 0
        left, right = mask.get("left"), mask.get("right")
        return (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)

    def logit(self, q, k):
        """The logit, and its derivative by the product."""
        s = self.scale * dot(q, k)
        if self.softcap is None:
            return s, 1.0
        tanh = math.tanh(s / self.softcap)
        return self.softcap * tanh, 1.0 - tanh * tanh

    def run(self):
        for sequence in self.problem["sequences"]:
            q_rows, kv_rows = rows_of(sequence["q"]), rows_of(sequence["kv"])
            for head in range(self.problem["heads"]["q"]):
                self.forward(q_rows, kv_rows, head)
        if self.backward:
            for sequence in self.problem["sequences"]:
                self.gradients(rows_of(sequence["q"]), rows_of(sequence["kv"]))
        return self

    def forward(self, q_rows, kv_rows, head):
        sink = self.sink_of(head)
        for i, row in enumerate(q_rows):
            q = self.q.row(row, head)
            seen = [
                (self.logit(q, self.k.row(kv, head // self.group))[0], kv)
                for j, kv in enumerate(kv_rows)
                if self.sees(i, j, len(q_rows), len(kv_rows))
            ]
            logits = [logit for logit, _ in seen]
            if logits:
                self.max_logit[head] = max(self.max_logit[head], *logits)
            top = max(logits + ([sink] if sink is not None else []), default=-math.inf)
            if top == -math.inf:
                self.out.put(row, head, [0.0] * self.out.shape[2])
                self.lse.put(head, row, [-math.inf])
                continue
            weights = [math.exp(logit - top) for logit in logits]
            total = math.fsum(weights + ([math.exp(sink - top)] if sink is not None else []))
            columns = [0.0] * self.out.shape[2]
            rows = [self.v.row(kv, head // self.group) for _, kv in seen]
            for lane in range(len(columns)):
                columns[lane] = bf16(math.fsum(w * v[lane] for w, v in zip(weights, rows)) / total)
            self.out.put(row, head, columns)
            self.lse.put(head, row, [top + math.log(total)])

    def gradients(self, q_rows, kv_rows):
        kv_heads = self.problem["heads"]["kv"]
        qk, dv = self.dq.shape[2], self.dv.shape[2]
        sums = {}
        for kv_head in range(kv_heads):
            for kv in kv_rows:
                sums[kv, kv_head] = ([0.0] * qk, [0.0] * dv)
        for head in range(self.problem["heads"]["q"]):
            sink = self.sink_of(head)
            for i, row in enumerate(q_rows):
                q, dout = self.q.row(row, head), self.dout.row(row, head)
                lse, delta = self.lse.row(head, row)[0], dot(dout, self.out.row(row, head))
                dq = [0.0] * qk
                for j, kv in enumerate(kv_rows):
                    if not self.sees(i, j, len(q_rows), len(kv_rows)):
                        continue
                    k, v = self.k.row(kv, head // self.group), self.v.row(kv, head // self.group)
                    logit, slope = self.logit(q, k)
                    p = math.exp(logit - lse)
                    ds = p * (dot(dout, v) - delta) * slope * self.scale
                    dk, dv_row = sums[kv, head // self.group]
                    for lane in range(qk):
                        dq[lane] += ds * k[lane]
                        dk[lane] += ds * q[lane]
                    for lane in range(dv):
                        dv_row[lane] += p * dout[lane]
                self.dq.put(row, head, [bf16(value) for value in dq])
                if self.learnable:
                    self.dsink[head] -= math.exp(sink - lse) * delta
        for (kv, kv_head), (dk, dv_row) in sums.items():
            self.dk.put(kv, kv_head, [bf16(value) for value in dk])
            self.dv.put(kv, kv_head, [bf16(value) for value in dv_row])

    def body(self, edit=lambda head: None):
        lse = [self.lse.shape[0], self.lse.shape[1]]
        head = {"out": self.out.shape, "lse": lse, "max_logit": [len(self.max_logit)], "gradients": None}
        parts = [self.out.data, self.lse.data, array.array("f", self.max_logit)]
        if self.backward:
            head["gradients"] = {
                "dq": self.dq.shape, "dk": self.dk.shape, "dv": self.dv.shape, "dsink": [len(self.dsink)],
            }
            parts += [self.dq.data, self.dk.data, self.dv.data, array.array("f", self.dsink)]
        edit(head)
        text = json.dumps({"ranks": [head], "damage": []}).encode()
        return struct.pack("<I", len(text)) + text + b"".join(part.tobytes() for part in parts)


# --- failures ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "none": "everything is right",
    "version": "the answers are frames of version 1",
    "undeclared": "nothing is declared",
    "nonsense": "the declaration has a field that nobody knows",
    "not-json": "the declaration is no JSON",
    "closed": "the subject does not open, with a traceback",
    "dead": "the process ends before it answers",
    "never-reads": "nothing is read and nothing is answered",
    "crash": "the process gets a SIGSEGV",
    "kill": "the process gets a SIGKILL",
    "exit": "the process ends with code 7",
    "raise": "the subject raises an error, and its process is sound",
    "oom": "memory runs out",
    "refuse": "a problem inside the table is refused",
    "hang": "nothing more is heard after the launch",
    "late": "the answer comes 30 seconds late",
    "print": "the subject prints to standard output, which is harmless",
    "flood-stderr": "the subject writes 64 MB to standard error, which is harmless",
    "flood-stdout": "the subject writes to the pipe of the answers without end",
    "shapes": "the shapes are not those of the bytes",
    "transposed": "the shapes fit the bytes and not the problem",
    "huge": "a body of 2^62 bytes is announced",
    "cut": "half an answer, and then the end",
    "sequence": "the answer is to another request",
    "order": "a phase comes after a later one",
    "compiling": "kernels are built without end",
    "long-text": "the error's text is longer than a body without tensors may be",
    "wrong": "the results are wrong",
    "history": "the results are wrong after a run with a soft cap in the same process",
    "deaf": "the end of the requests is not noticed",
    "idle": "the results are there at once, and nothing is computed",
}


class Failure(Exception):
    pass


class Worker:
    def __init__(self, fault="none", when="always", attention=Attention, declaration=DECLARATION, pipe=None):
        self.fault, self.when = fault, when
        self.attention, self.declaration = attention, declaration
        self.runs, self.capped = 0, False
        self.pipe = pipe or Pipe.own()

    def is_now(self, fault, problem):
        if fault != self.fault:
            return False
        if self.when.startswith("once:"):
            return problem["data_seed"] == int(self.when[5:]) and self.is_first()
        others = problem["data_seed"] != SENTINEL_SEED
        softcap = problem["softmax"].get("softcap") is not None
        known = {"always": True, "others": others, "softcap": softcap}
        return known.get(self.when, str(self.runs) == self.when)

    def is_first(self):
        try:
            os.close(os.open(os.path.join(sys.argv[3], "once"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def live(self):
        if self.fault == "dead":
            sys.exit("the mock is dead")
        if self.fault == "never-reads":
            time.sleep(HANG)
        if self.fault == "deaf":
            self.pipe.exactly = self.exactly_or_never
        while True:
            kind, sequence, body = self.pipe.read()
            if kind == OPEN:
                self.open(sequence)
            else:
                self.run(sequence, body)

    def exactly_or_never(self, count):
        got = self.pipe.requests.read(count)
        while len(got) < count:
            time.sleep(HANG)
        return got

    def open(self, sequence):
        if self.fault == "idle":
            self.declaration = LARGE
        ready = {"devices": 1, "name": "python", "versions": {"python": "%d.%d" % sys.version_info[:2]}}
        if self.fault == "nonsense":
            ready["declared"] = {**self.declaration, "softcaps": True}
        elif self.fault != "undeclared":
            ready["declared"] = self.declaration
        if self.fault == "closed":
            text = "Traceback (most recent call last):\n  File \"kernel.py\", line 1\nImportError: no such kernel"
            self.pipe.say(FAILED, sequence, {"Infrastructure": text})
        elif self.fault == "not-json":
            self.pipe.write(READY, sequence, b"{ready}")
        else:
            self.pipe.say(READY, sequence, ready, version=1 if self.fault == "version" else VERSION)

    def run(self, sequence, body):
        self.runs += 1
        length = struct.unpack("<I", body[:4])[0]
        problem = json.loads(body[4:4 + length])
        self.pipe.phase(sequence, RECEIVED)
        tensors = inputs(problem, body[4 + length:])
        self.pipe.phase(sequence, UPLOADED)
        try:
            self.fail(sequence, problem)
        except Failure:
            return
        result = self.attention(problem, tensors)
        if not self.is_now("idle", problem):
            result.run()
        self.tamper(problem, result)
        self.pipe.phase(sequence, DONE, {"peak_bytes": len(body), "launches": 1})
        self.answer(sequence, problem, result)

    def fail(self, sequence, problem):
        now = lambda fault: self.is_now(fault, problem)
        if now("compiling"):
            for _ in range(40):
                self.pipe.phase(sequence, COMPILING)
        self.pipe.phase(sequence, COMPILING)
        self.pipe.phase(sequence, LAUNCHED)
        if now("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if now("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if now("exit"):
            os._exit(7)
        if now("hang"):
            faulthandler.register(signal.SIGUSR1)
            time.sleep(HANG)
        if now("late"):
            time.sleep(30)
        if now("print"):
            print("a kernel's compiler prints", flush=True)
        if now("flood-stderr"):
            for _ in range(64):
                sys.stderr.write("e" * (1 << 20))
            sys.stderr.flush()
        if now("flood-stdout"):
            while True:
                self.pipe.raw(b"x" * (1 << 16))
        if now("order"):
            self.pipe.phase(sequence, UPLOADED)
        if now("huge"):
            head = MAGIC + bytes([VERSION, OUTPUTS, 0, 0, 0]) + struct.pack("<QQ", sequence, 1 << 62)
            self.pipe.raw(head + bytes(32))
            time.sleep(HANG)
        failures = {
            "raise": {"Raised": "ValueError: a mask that nobody knows\nkernel.py, line 7"},
            "long-text": {"Raised": "x" * (2 << 20)},
            "oom": {"OutOfMemory": "the mock wants more"},
            "refuse": {"Refused": "softcap"},
        }
        if self.fault in failures and now(self.fault):
            self.pipe.say(FAILED, sequence, failures[self.fault])
            if self.fault == "oom":
                sys.exit(0)
            raise Failure

    def tamper(self, problem, result):
        spoilt = self.capped and self.is_now("history", problem)
        self.capped |= problem["softmax"].get("softcap") is not None
        if spoilt or self.is_now("wrong", problem):
            for index, value in enumerate(result.out.data):
                if value == value and abs(value) != math.inf:
                    result.out.data[index] = bf16(1.0 - value)

    def answer(self, sequence, problem, result):
        now = lambda fault: self.is_now(fault, problem)

        def lie(head):
            if now("shapes"):
                head["out"][0] += 1
            if now("transposed"):
                head["out"].reverse()

        body = result.body(lie)
        if now("cut"):
            head, body, _ = frame(OUTPUTS, sequence, body)
            self.pipe.raw(head + body[:len(body) // 2])
            sys.exit(0)
        self.pipe.write(OUTPUTS, sequence + now("sequence"), body)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] not in FAULTS:
        sys.exit(f"no such fault; there are {', '.join(FAULTS)}")
    Worker(*sys.argv[1:3]).live()
