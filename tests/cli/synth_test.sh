# switchyard synth: a small checkpoint that runs, the same bytes for a seed, a full disk, usage.
. tests/cli/common.sh
mounted=
cleanup()
{
    [ -z "$mounted" ] || umount "$dir/disk"
    rm -rf "$dir"
}
trap cleanup EXIT
config=models/demo/config.json

# expect RC TEXT ARGUMENT..: the exit code, and a text on standard output or error
expect()
{
    local want=$1 text=$2 got
    shift 2
    "$SWITCHYARD" synth "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "synth $*: want exit code $want, got $got: $(cat "$dir/stderr")"
    grep -qF -- "$text" "$dir/stdout" "$dir/stderr" || [ -z "$text" ] ||
        fail "synth $*: want '$text', got: $(cat "$dir/stdout" "$dir/stderr")"
    [ "$want" -ne 1 ] || [ "$(wc -l <"$dir/stderr")" -eq 1 ] ||
        fail "synth $*: want one line, got: $(cat "$dir/stderr")"
}

expect 0 '' --config $config --layers 2 --seed 7 --out "$dir/a" --threads 1
expect 0 '' --config $config --layers 2 --seed 7 --out "$dir/b" --threads 2
diff -r "$dir/a" "$dir/b" >/dev/null || fail "one seed, two contents"
expect 0 '' --config $config --layers 3 --dense-layers 2 --scale-fmt ue8m0 --out "$dir/c"
grep -q '"scale_fmt": "ue8m0"' "$dir/c/config.json" || fail "no scale_fmt in config.json"
grep -q '"first_k_dense_replace": 2' "$dir/c/config.json" || fail "want 2 dense layers"

"$SWITCHYARD" generate "$dir/a" --ids 0,1,2 --max-tokens 3 --ignore-eos --json >"$dir/out" 2>"$dir/err" ||
    fail "a synthetic model does not run: $(cat "$dir/err")"

expect 1 'want an empty directory' --config $config --out "$dir/a"
expect 1 "$dir/none: cannot open: No such file or directory" --config "$dir/none" --out "$dir/d"
expect 2 'architecture: no '\''x'\''; known: deepseek-v3, deepseek-v2-lite, kimi-k2, mixtral-8x7b' --arch x --layers 1 --out "$dir/d"
expect 2 '--dense-layers: want at most 2 layers, got 3' --config $config --layers 2 --dense-layers 3 \
    --out "$dir/d"
expect 2 '--dense-layers: want at most 2 layers, got 3' --arch deepseek-v3 --layers 2 --dense-layers 3 \
    --out "$dir/d"
expect 1 '--dense-layers: want at most 6 layers, got 7' --config $config --dense-layers 7 --out "$dir/d"
expect 1 '--dense-layers: want 0, mixtral has none' --arch mixtral-8x7b --layers 2 --dense-layers 1 \
    --out "$dir/d"
expect 1 '--mtp: deepseek_v2 has no such module' --arch deepseek-v2-lite --layers 2 --mtp --out "$dir/d"
expect 2 'want --out DIR' --config $config
expect 2 'want one of --arch and --config' --out "$dir/d"
expect 2 'want --layers N with --arch' --arch deepseek-v3 --out "$dir/d"
expect 0 'It has no tokenizer' --help
echo '{' | "$SWITCHYARD" synth --config - --out "$dir/d" 2>"$dir/stderr" &&
    fail "a broken config on standard input: want a failure"
grep -q '^switchyard synth: standard input: bad JSON' "$dir/stderr" ||
    fail "a broken config on standard input: $(cat "$dir/stderr")"
[ ! -e "$dir/d" ] || fail "a refused call left a directory"

# A small file system of its own, where that is allowed.
mkdir "$dir/disk"
if [ "$(id -u)" -eq 0 ] && mount -t tmpfs -o size=8m tmpfs "$dir/disk" 2>/dev/null; then
    mounted=1
    expect 1 'the file system has ' --config $config --out "$dir/disk/model"
    # Space that is there at the check, and no inode for the second shard.
    umount "$dir/disk" && mount -t tmpfs -o size=80m,nr_inodes=5 tmpfs "$dir/disk"
    expect 1 'cannot write: No space left on device; the checkpoint needs ' --config $config \
        --shard-bytes 4000000 --out "$dir/disk/model"
    [ -z "$(ls "$dir/disk")" ] || fail "a full disk: files were left: $(ls "$dir/disk")"
else
    echo "not root, or no tmpfs: full file systems not tried"
fi
(
    ulimit -f 1000
    expect 1 'cannot write: File too large; the checkpoint needs ' --config $config --out "$dir/e"
    exit "$n_failed"
) || n_failed=1
[ ! -e "$dir/e" ] || fail "a failed call left files"

# Signals in the middle: nothing is left, one line, 128 + signal. On a terminal an unfinished bar goes.
python3 - "$SWITCHYARD" $config "$dir" <<'PY' || fail "signals"
import os, pty, select, signal, subprocess, sys, time

binary, config, dir = sys.argv[1:]

def call(out):
    return [binary, "synth", "--config", config, "--layers", "600", "--shard-bytes", "2000000",
            "--threads", "1", "--out", out]

def until_shards(out):
    end = time.time() + 300
    while not os.path.isdir(out) or len(os.listdir(out)) < 3:
        assert time.time() < end, "no shards"
        time.sleep(0.01)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    for made in (False, True):
        out = f"{dir}/signal"
        if made:
            os.mkdir(out)
        program = subprocess.Popen(call(out), stderr=subprocess.PIPE, text=True)
        until_shards(out)
        program.send_signal(number)
        errors = program.communicate(timeout=300)[1]
        assert program.returncode == 128 + number, (number, program.returncode, errors)
        assert errors.count("\n") == 1 and f"{out}: stopped after " in errors, errors
        assert os.path.isdir(out) == made and (not made or not os.listdir(out)), "files were left"
        if made:
            os.rmdir(out)

# nohup: a signal that is ignored stays so
program = subprocess.Popen([binary, "synth", "--config", config, "--layers", "100", "--shard-bytes",
                            "2000000", "--threads", "1", "--out", f"{dir}/nohup"],
                           preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
until_shards(f"{dir}/nohup")
program.send_signal(signal.SIGHUP)
assert program.wait(timeout=300) == 0

pid, fd = pty.fork()
if pid == 0:
    os.execv(binary, call(f"{dir}/terminal"))
seen = b""

def read_on():
    global seen
    try:
        part = os.read(fd, 4096) if select.select([fd], [], [], 1)[0] else None
    except OSError: # the end of a terminal
        part = b""
    seen += part or b""
    return part != b""

end = time.time() + 300
while b"%" not in seen:
    assert time.time() < end, seen
    read_on()
os.write(fd, b"\x03")
while read_on():
    assert time.time() < end, seen
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == 130, (status, seen)
assert b"] " in seen and b"%" not in seen[seen.rindex(b"\r" + b" " * 54 + b"\r"):], seen
assert seen.endswith(b"removed\r\n") and not os.path.exists(f"{dir}/terminal"), seen
PY

[ "$n_failed" -eq 0 ] || exit 1
echo "synth: ok"
