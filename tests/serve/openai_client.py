"""The openai package against a server of the demo model: openai_client.py URL KEY SWITCHYARD MODEL.
Everything that clients of the API build on: whole answers, streams, both interfaces, errors."""
import asyncio
import json
import subprocess
import sys
import urllib.request

import openai

url, key, switchyard, model_dir = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
HELLO = [{"role": "user", "content": "What is a horse?"}]


def chat(**options):
    return client.chat.completions.create(**{"model": "demo", "messages": HELLO, "temperature": 0,
                                             "max_tokens": 12, **options})


def complete(prompt, **options):
    return client.completions.create(**{"model": "demo", "prompt": prompt, "temperature": 0,
                                        "max_tokens": 12, **options})


def generated(prompt, n):
    """What the command line says without a server."""
    out = subprocess.run([switchyard, "generate", model_dir, "--prompt", prompt, "--max-tokens", str(n), "--json"],
                         check=True, capture_output=True).stdout
    return json.loads(out)["text"]


def refused(kind, call, **expected):
    try:
        call()
    except kind as e:
        for name, want in expected.items():
            got = getattr(e, name)
            assert got == want, f"{name}: want {want}, got {got}: {e}"
        return e
    raise AssertionError(f"want {kind.__name__}, got an answer")


def joined(stream):
    """Text and finish reasons by index, the usage, and the number of chunks."""
    text, finish, usage, n = {}, {}, None, 0
    for chunk in stream:
        n += 1
        assert usage is None, "usage comes last"
        if not chunk.choices:
            usage = chunk.usage
        for c in chunk.choices:
            piece = c.delta.content if hasattr(c, "delta") else c.text
            text[c.index] = text.get(c.index, "") + (piece or "")
            assert c.index not in finish, "nothing after the end"
            if c.finish_reason:
                finish[c.index] = c.finish_reason
    return text, finish, usage, n


def test_models():
    models = client.models.list().data
    assert [m.id for m in models] == ["demo"]
    assert models[0].max_model_len == 4096
    assert client.models.retrieve("demo").id == "demo"
    refused(openai.NotFoundError, lambda: client.models.retrieve("gpt-9"), code="model_not_found")


def test_whole():
    a = chat()
    c = a.choices[0]
    assert a.object == "chat.completion" and a.model == "demo" and a.system_fingerprint
    assert c.message.role == "assistant" and c.message.content and c.finish_reason == "length"
    assert a.usage.completion_tokens == 12
    assert a.usage.total_tokens == a.usage.prompt_tokens + 12
    assert a.usage.prompt_tokens_details.cached_tokens == 0
    parts = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What is a horse?"}]}])
    assert parts.choices[0].message.content == c.message.content


def test_equal_to_the_command_line():
    for prompt in ("One day", "The quick brown fox", "In the beginning God created"):
        assert complete(prompt, max_tokens=24).choices[0].text == generated(prompt, 24), prompt


def test_stream():
    whole = chat(max_tokens=40).choices[0]
    text, finish, usage, n = joined(chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert text == {0: whole.message.content} and finish == {0: whole.finish_reason}
    assert usage.completion_tokens > 0 and n > 3
    first = next(iter(chat(stream=True)))
    assert first.choices[0].delta.role == "assistant" and first.object == "chat.completion.chunk"
    text, finish, usage, n = joined(complete(["One day", "Two men"], n=2, stream=True, temperature=1, seed=5))
    assert sorted(text) == [0, 1, 2, 3] and sorted(finish) == [0, 1, 2, 3] and usage is None
    again = complete(["One day", "Two men"], n=2, temperature=1, seed=5)
    assert [c.text for c in again.choices] == [text[i] for i in range(4)]


def test_choices_and_seeds():
    a = complete("One day", n=3, temperature=1, seed=11)
    b = complete("One day", n=3, temperature=1, seed=11)
    assert [c.text for c in a.choices] == [c.text for c in b.choices]
    assert [c.index for c in a.choices] == [0, 1, 2]
    assert len({c.text for c in a.choices}) == 3
    alone = complete("One day", temperature=1, seed=11)
    assert alone.choices[0].text == a.choices[0].text
    assert a.usage.prompt_tokens == alone.usage.prompt_tokens, "a prompt counts once"
    assert len({complete("One day", temperature=1).choices[0].text for _ in range(5)}) > 1, "a seed is drawn"


def test_stop():
    whole = complete("One day", max_tokens=40).choices[0].text
    middle = whole[10:14]
    at = whole.index(middle)
    a = complete("One day", max_tokens=40, stop=[middle, "never said"])
    assert a.choices[0].text == whole[:at] and a.choices[0].finish_reason == "stop"
    assert a.choices[0].stop_reason == middle
    text, finish, _, _ = joined(complete("One day", max_tokens=40, stop=middle, stream=True))
    assert text == {0: whole[:at]} and finish == {0: "stop"}


def test_logprobs():
    content = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 12
    for t in content:
        assert len(t.top_logprobs) == 3 and t.logprob <= 0
        assert t.top_logprobs[0].logprob == t.logprob, "greedy takes the likeliest"
        assert bytes(t.bytes).decode() == t.token
    a = complete("One day in spring", echo=True, logprobs=1, max_tokens=1)
    l = a.choices[0].logprobs
    assert a.choices[0].text.startswith("One day in spring")
    assert "".join(l.tokens) == a.choices[0].text and l.token_logprobs[0] is None
    assert len(l.tokens) == a.usage.total_tokens == len(l.text_offset) == len(l.top_logprobs)
    again = complete("One day in spring", echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert again.token_logprobs == l.token_logprobs
    alone = complete("One day in spring", logprobs=1, max_tokens=1).choices[0].logprobs
    assert alone.token_logprobs == l.token_logprobs[-1:]


def test_sampling():
    ids = post("/tokenize", {"prompt": " horse"})["tokens"]
    assert len(ids) == 1
    assert complete("One day", logit_bias={str(ids[0]): 100}, max_tokens=4).choices[0].text == " horse" * 4
    go_on = {"max_tokens": 64, "extra_body": {"ignore_eos": True}}
    plain = complete("One day", **go_on)
    assert plain.usage.completion_tokens == 64 and plain.choices[0].finish_reason == "length"
    assert complete("One day", frequency_penalty=2, presence_penalty=2, **go_on).choices[0].text != plain.choices[0].text
    assert complete("One day", temperature=1, top_p=0, **go_on).choices[0].text == plain.choices[0].text
    stopped = complete("One day", max_tokens=8, extra_body={"stop_token_ids": ids}, logit_bias={str(ids[0]): 100})
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].stop_reason == ids[0]


def post(path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(),
                                     {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def test_tokens():
    tokens = post("/tokenize", {"prompt": "One day, Füchse \U0001f388"})["tokens"]
    assert post("/detokenize", {"tokens": tokens})["prompt"] == "One day, Füchse \U0001f388"

    two = complete([tokens[:2], tokens[:3]])
    assert len(two.choices) == 2
    assert two.usage.prompt_tokens == 5


def test_prefix_cache():
    prompt = "A long story. " * 60
    first = complete(prompt, max_tokens=8)
    second = complete(prompt, max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > 0 and cached % 64 == 0, second.usage
    assert second.usage.prompt_cache_hit_tokens == cached
    assert second.usage.prompt_cache_miss_tokens == second.usage.prompt_tokens - cached
    assert first.choices[0].text == second.choices[0].text


def test_refusals():
    refused(openai.BadRequestError, lambda: chat(temperature=9), param="temperature")
    refused(openai.BadRequestError, lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}]),
            param="tools", code="unsupported_parameter")
    refused(openai.BadRequestError, lambda: chat(response_format={"type": "json_object"}), param="response_format")
    refused(openai.BadRequestError, lambda: chat(messages=[]), param="messages")
    refused(openai.BadRequestError, lambda: chat(messages=[{"role": "x", "content": "y"}]), param="messages")
    refused(openai.NotFoundError, lambda: chat(model="gpt-9"), code="model_not_found")
    e = refused(openai.BadRequestError, lambda: chat(messages=[{"role": "user", "content": "word " * 5000}], stream=True),
                param="messages", code="context_length_exceeded")
    assert "maximum context length is 4096 tokens" in str(e)
    wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, lambda: wrong.models.list(), code="invalid_api_key")


def jobs():
    for line in urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines():
        if line.startswith("switchyard_jobs "):
            return int(line.split()[1])
    raise AssertionError("no metric")


def test_leaving():
    stream = chat(max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert jobs() == 1
    stream.close()
    while jobs() > 0:
        pass


async def many():
    a = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
    prompts = [f"{w} {t}" for w in ("One", "The", "A", "My") for t in ("day", "man", "old horse", "king of the sea")]

    async def ask(prompt):
        text = ""
        async for chunk in await a.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0,
                                                      stream=True):
            text += chunk.choices[0].text
        return text

    alone = [complete(p, max_tokens=24).choices[0].text for p in prompts]
    together = await asyncio.gather(*(ask(p) for p in prompts * 3))
    assert together == alone * 3, "an answer among others is the answer alone"


def test_async():
    asyncio.run(many())


failed = 0
for name, test in list(globals().items()):
    if name.startswith("test_"):
        try:
            test()
            print(f"ok {name[5:]}")
        except Exception as e:  # the next one can still tell something
            failed += 1
            print(f"FAIL {name[5:]}: {type(e).__name__}: {e}")
sys.exit(failed > 0)
