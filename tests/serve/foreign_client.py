"""A foreign client of the engine RPC, against `switchyard engine` with the demo model on two ranks:
foreign_client.py SWITCHYARD MODEL DIR; DIR holds engine.desc and gets the socket and the logs."""
import json
import os
import queue
import signal
import subprocess
import sys
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

switchyard, model, folder = sys.argv[1:]
pool = descriptor_pool.DescriptorPool()
with open(f"{folder}/engine.desc", "rb") as f:
    for file in descriptor_pb2.FileDescriptorSet.FromString(f.read()).file:
        pool.Add(file)
PATIENCE_S = 600


def message(name):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"switchyard.v1.{name}"))


GenerateRequest, Tokens, Request, State = (message(n) for n in ("GenerateRequest", "Tokens", "Request", "State"))
RUNNING, STOP, LENGTH, ABORTED, ERROR = range(5)


class Client:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])

    def unary(self, name, request, reply, **args):
        call = self.channel.unary_unary(f"/switchyard.v1.Engine/{name}", message(request).SerializeToString,
                                        message(reply).FromString)
        return lambda **fields: call(message(request)(**fields), wait_for_ready=True, timeout=PATIENCE_S, **args)

    def health(self):
        return self.unary("Health", "HealthRequest", "HealthReply")()

    def watch(self, stream=0, timeout=PATIENCE_S):
        call = self.channel.unary_stream("/switchyard.v1.Engine/Watch", message("WatchRequest").SerializeToString,
                                         State.FromString)
        return call(message("WatchRequest")(stream=stream), wait_for_ready=True, timeout=timeout)

    def generate(self, serialize=GenerateRequest.SerializeToString):
        return Stream(self.channel.stream_stream("/switchyard.v1.Engine/Generate", serialize, Tokens.FromString))


class Stream:
    """A Generate stream: what is put goes out; outputs are gathered by tag and choice."""

    def __init__(self, call):
        self.queue = queue.Queue()
        self.call = call(iter(self.queue.get, None), wait_for_ready=True, timeout=PATIENCE_S)
        self.outputs = {}
        self.number = next(self.call).stream
        assert self.number > 0

    def ask(self, tag, prompt, **fields):
        self.queue.put(GenerateRequest(request=Request(tag=tag, prompt=prompt, **fields)))

    def abort(self, tag, **fields):
        self.queue.put(GenerateRequest(abort=message("Abort")(tag=tag, **fields)))

    def close(self):
        self.queue.put(None)

    def take(self):
        """One message; False at the end of the stream."""
        try:
            tokens = next(self.call)
        except StopIteration:
            return False
        for o in tokens.output:
            a = self.outputs.setdefault((o.tag, o.choice), {"tokens": [], "logprobs": [], "finish": RUNNING})
            assert a["finish"] == RUNNING, "an output after the last one"
            a["tokens"] += o.token
            a["logprobs"] += zip(o.logprob_token, o.logprob)
            assert len(o.logprob) == len(o.logprob_token) == len(o.token) * o.n_logprobs
            a.update(finish=o.finish, message=o.message, retry=o.retry)
        return True

    def answer(self, tag, choice=0):
        while self.outputs.get((tag, choice), {"finish": RUNNING})["finish"] == RUNNING:
            assert self.take(), "the stream ended early"
        return self.outputs[tag, choice]

    def first_token(self, tag):
        while not self.outputs.get((tag, 0), {"tokens": []})["tokens"]:
            assert self.take(), "the stream ended early"


def code_of(function):
    try:
        function()
    except grpc.RpcError as e:
        return e.code()
    raise AssertionError("no error")


class Pod:
    def __init__(self, *args):
        self.log = open(f"{folder}/log", "a+")
        self.process = subprocess.Popen([switchyard, "engine", model, "--ranks", "2", "--exact", "--threads", "1",
                                         "--timeout", "100", "--drain-timeout", str(PATIENCE_S), "--json", *args],
                                        stdout=subprocess.PIPE, stderr=self.log, text=True)

    def ready(self):
        line = self.process.stdout.readline()
        assert line, open(f"{folder}/log").read()
        return json.loads(line)

    def ranks(self):
        def children(pid):
            return [int(p) for p in open(f"/proc/{pid}/task/{pid}/children").read().split()]
        spawner, = children(self.process.pid)
        return [spawner] + children(spawner)


def gone(pid):
    try:
        return ") Z" in open(f"/proc/{pid}/stat").read()
    except FileNotFoundError:
        return True


def wait_for(condition, what):
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def expected(prompt, n):
    out = subprocess.run([switchyard, "generate", model, "--exact", "--ids", ",".join(map(str, prompt)), "--json",
                          "--max-tokens", str(n), "--ignore-eos"], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)["ids"]


prompts = [[0, 3 + 7 * i, 11 + i, 40 + i] for i in range(6)]


def answers(client):
    stream = client.generate()
    for tag, prompt in enumerate(prompts):
        stream.ask(tag, prompt, instance=tag % 2, max_new_tokens=12, ignore_eos=True)
    stream.ask(50, prompts[0], max_new_tokens=4, n_choices=2, ignore_eos=True)
    stream.ask(51, prompts[0], max_new_tokens=3, n_logprobs=3, ignore_eos=True)
    stream.close()
    while stream.take():
        pass
    for tag, prompt in enumerate(prompts):
        a = stream.outputs[tag, 0]
        assert a["finish"] == LENGTH and a["tokens"] == expected(prompt, 12), (tag, a)
    for choice in (0, 1):
        assert stream.outputs[50, choice]["tokens"] == stream.outputs[0, 0]["tokens"][:4], stream.outputs
    of = stream.outputs[51, 0]["logprobs"]
    assert [token for token, _ in of[::3]] == stream.outputs[0, 0]["tokens"][:3], of
    assert [of[0], of[3], of[6]] == [of[1], of[4], of[7]] and of[1][1] >= of[2][1], of  # greedy: the likeliest
    assert stream.call.code() == grpc.StatusCode.OK


def states(client):
    stream = client.generate()
    watch = client.watch(stream.number)
    state = next(watch)
    pod = state.pod
    assert pod.n_instances == 2 and pod.n_ranks == 2 and pod.n_ranks_alive == 2 and pod.serves, pod
    assert pod.context > 100 and pod.vocab > 100 and len(pod.page_root) == 16 and pod.model.startswith("demo-")
    stream.ask(1, prompts[0], instance=1, max_new_tokens=3000, ignore_eos=True)
    seen = [{}, {}]
    until = time.monotonic() + PATIENCE_S
    while not (seen[1].get("n_seen") == 1 and seen[1]["running_tokens"] > 0):
        assert time.monotonic() < until, seen
        for i in next(watch).instance:
            assert not i.pages.hash or len(i.pages.hash) % 16 == 0
            if i.HasField("report"):
                seen[i.instance] = {"n_seen": i.report.n_seen, "running_tokens": i.report.running_tokens}
    assert seen[0].get("n_seen", 0) == 0
    abort = client.unary("Abort", "AbortRequest", "AbortReply")
    assert abort(stream=stream.number, tag=1).found
    assert not abort(stream=stream.number, tag=2).found
    assert not abort(stream=12345, tag=1).found
    assert stream.answer(1)["finish"] == ABORTED
    watch.cancel()
    stream.close()


def refusals(client):
    stream = client.generate()
    stream.ask(1, prompts[0], instance=2)
    stream.ask(2, [])
    stream.ask(3, [10 ** 8])
    stream.ask(4, prompts[0], top_p=1.5)
    stream.ask(5, prompts[0], temperature=float("nan"))
    stream.ask(6, prompts[0], n_choices=2 ** 32 - 1)
    stream.ask(7, [5] * 100000)
    stream.ask(8, prompts[0], max_new_tokens=1)
    assert stream.answer(8)["finish"] in (LENGTH, STOP)
    for tag, what in ((1, "instance"), (2, "prompt"), (3, "token"), (4, "top_p"), (5, "temperature"), (6, "choices"),
                      (7, "prompt")):
        a = stream.answer(tag)
        assert a["finish"] == ERROR and what in a["message"] and not a["retry"], (tag, a)
    stream.close()
    assert not stream.take()

    raw = client.generate(serialize=lambda b: b)
    raw.queue.put(b"\xff\xff\xff")
    assert code_of(raw.take) == grpc.StatusCode.INVALID_ARGUMENT
    raw = client.generate(serialize=lambda b: b)
    raw.queue.put(b"\x0a" + b"\x00" * 5000000)
    assert code_of(raw.take) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(lambda: list(client.watch(timeout=0.3))) == grpc.StatusCode.DEADLINE_EXCEEDED
    nothing = client.channel.unary_unary("/switchyard.v1.Engine/Nothing")
    assert code_of(lambda: nothing(b"", timeout=PATIENCE_S)) == grpc.StatusCode.UNIMPLEMENTED


def running(client):
    state = client.watch()
    while True:
        reports = [i.report for i in next(state).instance if i.HasField("report")]
        if len(reports) == 2:
            state.cancel()
            return sum(r.n_requests for r in reports)


def leaving(client):
    for _ in range(20):
        stream = client.generate()
        stream.ask(1, prompts[0], max_new_tokens=3000, ignore_eos=True)
        stream.ask(2, prompts[1], instance=1, max_new_tokens=3000, ignore_eos=True)
        stream.first_token(1)
        stream.call.cancel()
        stream.close()
    wait_for(lambda: running(client) == 0, "requests of streams that are gone")


def lost_rank(client):
    stream = client.generate()
    stream.ask(1, prompts[0], max_new_tokens=3000, ignore_eos=True)
    stream.ask(2, prompts[1], instance=1, max_new_tokens=3000, ignore_eos=True)
    stream.first_token(1)
    stream.first_token(2)
    os.kill(pod.ranks()[2], signal.SIGKILL)
    for tag in (1, 2):
        a = stream.answer(tag)
        assert a["finish"] == ERROR and a["retry"] and "rank" in a["message"], a
    stream.ask(3, prompts[2], instance=1, max_new_tokens=12, ignore_eos=True)
    assert stream.answer(3)["tokens"] == expected(prompts[2], 12)
    health = client.health()
    assert health.ready and health.generation >= 2 and health.n_ranks_alive == 2, health
    stream.close()


def drained(client):
    stream = client.generate()
    stream.ask(1, prompts[0], max_new_tokens=3000, ignore_eos=True)
    stream.first_token(1)
    ranks = pod.ranks()
    pod.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not client.health().ready, "not ready once it ends")
    stream.ask(2, prompts[1], max_new_tokens=4)
    a = stream.answer(2)
    assert a["finish"] == ERROR and a["retry"] and "ending" in a["message"], a
    assert len(stream.answer(1)["tokens"]) == 3000
    assert pod.process.wait(PATIENCE_S) == 0
    assert all(gone(p) for p in ranks)


def killed(client):
    pod = Pod("--listen", f"unix:{folder}/killed")
    pod.ready()
    ranks = pod.ranks()
    stream = Client(f"unix:{folder}/killed").generate()
    stream.ask(1, prompts[0], max_new_tokens=3000, ignore_eos=True)
    stream.first_token(1)
    pod.process.kill()
    assert code_of(lambda: [None for _ in iter(stream.take, False)]) == grpc.StatusCode.UNAVAILABLE
    pod.process.wait()
    wait_for(lambda: all(gone(p) for p in ranks), "processes of a pod that was killed")
    again = Pod("--listen", f"unix:{folder}/killed")  # over what the killed one left
    again.ready()
    again.process.terminate()
    assert again.process.wait(PATIENCE_S) == 0


pod = Pod("--listen", "127.0.0.1:0")
try:
    address = pod.ready()["address"]
    client = Client(address)
    taken = subprocess.run([switchyard, "engine", model, "--listen", address], capture_output=True, text=True)
    assert taken.returncode == 1 and "cannot listen" in taken.stderr, taken
    assert client.health().ready
    for test in (answers, states, refusals, leaving, answers, lost_rank, drained, killed):
        test(client)
        print(test.__name__, "ok", flush=True)
except BaseException:
    print(open(f"{folder}/log").read(), file=sys.stderr)
    raise
finally:
    pod.process.kill()
    pod.process.wait()
