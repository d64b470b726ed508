"""What all peers of `seamproof bench attention --peer` share: the loop over requests, and the time of a launch.

A request and its answer are described in src/bench/peer.rs.
"""

import json
import math
import statistics
import sys
import time

import torch


def table(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def shapes(request):
    """Of q, k, v and dout."""
    rows = sum(request["padded"])
    heads_q, heads_kv = request["heads"]
    return [(rows, heads, request["dim"]) for heads in (heads_q, heads_kv, heads_kv, heads_q)]


def repeated(block, shape):
    size = math.prod(shape)
    return block.repeat(-(-size // block.numel()))[:size].reshape(shape)


def recorded(request, launches):
    """A graph of launches, as ours are recorded: none of them waits for the host, and the GPU does not rest between two
    repetitions, which at its power limit would make the next one faster."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for number in range(request["launches"]):
            launches[number % len(launches)]()
    return graph


def repetition(graph):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def repetitions(graph, duration_ms):
    """What each repetition took, repeated until a time on the clock is over, at least once."""
    begin, times = time.monotonic(), [repetition(graph)]
    while time.monotonic() - begin < duration_ms / 1e3:
        times.append(repetition(graph))
    return times


def milliseconds(request, launches):
    """Of a launch, in the mean, after a warm-up. All that comes before lets the GPU rest, and a GPU that rested exceeds its
    power limit until its controller steps in; then its clock swings around the limit. Seen on an H200 with a limit of 700 W:
    740 to 750 W for 0.75 s, a dip at 0.85 s, then swings of 0.8 s that make a launch up to 3 % faster or slower. The warm-up
    that is asked for ends after the dip, the measured time is whole swings: their mean is what a long run gets, where a median
    picks a phase."""
    graph = recorded(request, launches)
    repetitions(graph, request["warm_up_ms"])
    return statistics.fmean(repetitions(graph, request["measured_ms"])) / request["launches"]


def serve(measured, files):
    """Answers the requests of a file, or of standard input, with what `measured` says of each."""
    requests = open(files[0]) if files else sys.stdin
    torch.manual_seed(0)
    # Graphs are recorded on it, and a backward runs where its forward did.
    torch.cuda.set_stream(torch.cuda.Stream())
    for line in requests:
        request = json.loads(line)
        answer = {"track": request["track"], "column": request["column"]}
        try:
            with torch.no_grad():
                answer |= measured(request)
        except Exception as error:  # whatever it is, the next cell may do better
            answer["error"] = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        print(json.dumps(answer), flush=True)
